"""The words of a violation row, by name: what kernels and references append to the ring, and everybody else reads."""

from __future__ import annotations

from typing import NamedTuple

from kv_canary.constants import MASK64, OWNER_BITS, OWNER_MASK, STEP_MASK

_TAG_BITS = 8
_TAG_MASK = (1 << _TAG_BITS) - 1
# Groups whose numbers fit beside a tag.
MOST_GROUPS = 1 << 16


def site_of(tag: int, group: int) -> int:
    """Return the first word of the rows that a launch of this tag in this group reports."""
    return int(tag) | group << _TAG_BITS


class ViolationRow(NamedTuple):
    """One violation, as 16 words of int64. A word that was not read, or that does not apply, is 0 (token: -1).

    Args:
        site: the launch that found it, see `tag` and `group`.
        reasons: of `Reason`, summed.
        slot: that was read or written; the seed's for PREFIX.
        row: of the tables.
        position: that was expected there; the last one of the prefix for PREFIX; the tokens that it has behind the
            forward for BATCH.
        identity: word 0 of the record that was read, or is being stored.
        token: that was expected, or -1.
        chain: word 1 of the record that was read, or is being stored.
        expected_chain: where it was checked; the row's tail for PREFIX.
        kv: word 2 of the record that was read, or is being stored; for SEAL_K and SEAL_V the word of the band's seal.
        observed_kv: fingerprints of the bytes that lie there, where they were checked; for SEAL_K and SEAL_V what the
            word of the seal should be.
        writer: word 3 of the record that was read, or is being replaced; of a token that another one of its forward
            takes the slot from, that one's.
        step: of the canary.
        previous: slot of the position before; of a write, the seed's; the row that the model was given for BATCH.
        owner: of a write, whose it is.
        given: the length that the model was given for BATCH; the band of layers for SEAL_K and SEAL_V.
    """

    site: int = 0
    reasons: int = 0
    slot: int = 0
    row: int = 0
    position: int = 0
    identity: int = 0
    token: int = 0
    chain: int = 0
    expected_chain: int = 0
    kv: int = 0
    observed_kv: int = 0
    writer: int = 0
    step: int = 0
    previous: int = 0
    owner: int = 0
    given: int = 0

    @property
    def tag(self) -> int:
        """The launch that found it, see `Tag`."""
        return self.site & _TAG_MASK

    @property
    def group(self) -> int:
        """Number of the buffer group that it was found in, from 1 on; 0: that was not told."""
        return self.site >> _TAG_BITS

    @property
    def stored_position(self) -> int:
        """Position in the record that was read, or is being stored."""
        return (self.identity & MASK64) >> 32

    @property
    def writer_owner(self) -> int:
        """Owner in the record that was read, or is being replaced."""
        return self.writer & OWNER_MASK

    @property
    def writer_step(self) -> int:
        """Step in the record that was read, or is being replaced."""
        return ((self.writer & MASK64) >> OWNER_BITS) & STEP_MASK

    @property
    def has_record(self) -> bool:
        """Whether any word of a record was read or is being stored."""
        return bool(self.identity or self.chain or self.kv or self.writer)


VIOLATION_WORDS = len(ViolationRow._fields)

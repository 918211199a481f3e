"""The words of an exchange: what a rank says of itself, then the lines of a digest where there may be one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from kv_canary.errors import printable
from kv_canary.output import logger
from kv_canary.ranks.digest import Digest


class State(IntEnum):
    """Availability of the step that is compared, on a rank."""

    # There is no digest of it.
    NONE = 0
    COMPLETE = 1
    # A forward of it was given up.
    GAVE_UP = 2


_NUMBER, _STATE, _DIGEST_STEP, _GIVEN_UP, _TOTAL, _SEEN, _TEXT = range(7)
_TEXT_WORDS = 64
_HEADER = _TEXT + _TEXT_WORDS


@dataclass(frozen=True, kw_only=True)
class Header:
    """The words of a message that a rank says of itself.

    Args:
        number: the step that it is about to begin.
        state: what it has of the step that is compared.
        digest_step: that step; 0: none.
        given_up: how many steps had a forward that was given up, up to that one.
        total: violations that it has found since the last exchange.
        seen: the number of the last exchange that was over for it, of those since ranks met; 0: none.
        sentence: the first of them, in one line, whatever the other rank has sent.
    """

    number: int
    state: int
    digest_step: int
    given_up: int
    total: int
    seen: int
    sentence: str


def pack(
    shape: Sequence[int],
    *,
    number: int,
    seen: int,
    total: int,
    sentence: str,
    digest_step: int,
    digest: Digest | None,
    redacts: bool,
) -> tuple[torch.Tensor, dict[int, str]]:
    """Return int64 [n] what this rank sends before step `number`, and the names of the digest's requests by their keys.

    Args:
        shape: of a digest's lines.
        number, seen: see `Header`.
        total, sentence: what it found.
        digest_step: the step that is compared; 0: none.
        digest: of that step; None where there is none.
        redacts: whether the texts of what it raises are left out of the log.
    """
    words = torch.zeros(_HEADER + math.prod(shape), dtype=torch.int64)
    words[_NUMBER], words[_DIGEST_STEP], words[_TOTAL], words[_SEEN] = number, digest_step, total, seen
    text = sentence.encode()[: 8 * _TEXT_WORDS]
    words[_TEXT:_HEADER].view(torch.uint8)[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    names: dict[int, str] = {}
    if digest is not None:
        words[_GIVEN_UP], words[_STATE] = digest.given_up, State.GAVE_UP
        if not digest.gave_up:
            try:
                names = digest.pack(words[_HEADER:].view(*shape))
                words[_STATE] = State.NONE if digest.lines is None else State.COMPLETE
            except Exception as error:
                words[_HEADER:], words[_STATE] = 0, State.NONE
                logger.failure(
                    "kv-canary: ranks: the digest of step %d was not packed",
                    digest_step,
                    error=error,
                    redacts=redacts,
                )
    return words, names


def headers(received: torch.Tensor) -> list[Header]:
    """Return what every rank says in int64 [ranks, n] `received`."""
    return [
        Header(
            number=words[_NUMBER],
            state=words[_STATE],
            digest_step=words[_DIGEST_STEP],
            given_up=words[_GIVEN_UP],
            total=words[_TOTAL],
            seen=words[_SEEN],
            sentence=printable(_text(part)),
        )
        for words, part in zip(received[:, :_HEADER].tolist(), received, strict=True)
    ]


def lines(words: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the lines of the digest in int64 [n] `words` of one rank, in their `shape`."""
    return words[_HEADER:].view(*shape)


def _text(words: torch.Tensor) -> str:
    return bytes(words[_TEXT:_HEADER].view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="ignore")

"""Coverage by features: how many cases had each feature and each pair, and which pairs none had."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from rich.table import Table

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that a call can have.

    Args:
        name: `axis:value`.
        ops: those whose calls can have it.
        doc: what it is.
        within_op: it concerns one op's own work (where a tile of its kernel ends, say), so that it meets what the same
            call has, and nothing that other calls of a round have.
        exclusive: two values of its axis are alternatives, and make no pair.
    """

    name: str
    ops: frozenset[str]
    doc: str
    within_op: bool = False
    exclusive: bool = False

    @property
    def axis(self) -> str:
        return self.name.partition(":")[0]


def _features() -> dict[str, Feature]:
    # Ops that read tables, that check records, and that know the tokens to expect.
    planning, checking = "plan verify_prefixes", "verify verify_prefixes verify_resolved"
    expecting, described = f"{planning} verify_resolved", f"{planning} open_step"
    batch, launch = f"{described} write", f"{checking} write"
    chaining = "chain_tails open_step"
    segments = f"{chaining} scatter_token_ids"
    rows = f"{expecting} write {segments}"
    slots, sealing = "move retire", "seal verify_seals"
    holding, logging = f"{launch} {sealing}", f"{launch} verify_seals"
    table = [
        ("batch:empty", batch, "no live request"),
        ("batch:fresh", batch, "live requests have nothing cached"),
        ("batch:decode", batch, "live requests have a prefix and get one token"),
        ("batch:continued", batch, "live requests have a prefix and get several tokens, or none"),
        ("batch:mixed", batch, "several of these"),
        ("requests:one", rows, "one request, padding counted"),
        ("requests:several", rows, "more"),
        ("padding:rows", rows, "rows of padding"),
        ("hostile:value", f"{rows} {slots} {checking} {sealing}", "a value that no healthy table holds"),
        ("attention:full", described, "neither window nor LUT"),
        ("attention:window", described, "a window, planned for what the step reads"),
        ("attention:ring", "plan", "a window, planned for what is resident after the step"),
        ("attention:lut", planning, "slots are behind a LUT"),
        ("table:pages", described, "tables hold pages of a power of two of slots"),
        ("table:odd", described, "of another number"),
        ("table:rows", described, "requests have other rows in the tables than in the canary"),
        ("residency:evicted", planning, "the LUT maps a slot to 0"),
        ("capacity:truncated", planning, "more entries than there is room for"),
        ("strides:some", described, "a request's positions are verified in turns"),
        ("tokens:expected", f"{planning} {checking}", "entries know their tokens"),
        ("tokens:kept", chaining, "the requests' tokens are put into the token pool"),
        ("tokens:shifted", expecting, "a position's token stands elsewhere in its row"),
        ("tokens:oracle", "write", "the input ids to expect are known"),
        ("positions:unchecked", "write", "positions are not checked"),
        ("sharing:prefix", f"{planning} {checking}", "two rows name one slot"),
        ("segment:empty", f"write {segments}", "a live request without tokens"),
        ("starts:later", segments, "a row is continued"),
        ("slot:unmapped", checking, "a live position has the padding slot"),
        ("slot:trash", "write", "a live token goes to the padding slot"),
        ("slot:twice", "write", "two tokens have one slot"),
        ("page:one", holding, "a source of one token a row"),
        ("page:many", holding, "of a power of two"),
        ("page:odd", holding, "of another number"),
        ("layers:one", holding, "a source of one layer"),
        ("layers:many", holding, "of several"),
        ("windows:one", launch, "a token's bytes are covered at once"),
        ("windows:many", launch, "in turns"),
        ("windows:ragged", launch, "and the last turn is shorter"),
        ("alignment:word", holding, "words are aligned to 8 bytes"),
        ("alignment:less", holding, "they are not"),
        ("layout:bias", holding, "slot 1 is the source's first token"),
        ("layout:offset", holding, "bytes before a row's first token"),
        ("layout:between", holding, "bytes between tokens of a row"),
        ("layout:gaps", holding, "bytes between rows of a source"),
        ("layout:short", holding, "slots that the source does not have"),
        ("source:none", launch, "no bytes"),
        ("source:k", holding, "bytes of K only"),
        ("source:v", holding, "bytes of V only"),
        ("source:both", holding, "of both"),
        ("ring:none", logging, "violations are counted only"),
        ("ring:full", logging, "the log has no room left"),
        ("ring:room", logging, "it has"),
        ("lifetime:tracked", launch, "use after free is looked for"),
        ("anchors:given", f"{checking} {chaining}", "requests have identities"),
        ("record:zero", f"{launch} {slots} {sealing}", "a slot that was never written"),
        ("record:retired", f"{launch} {slots} {sealing}", "a slot that was freed"),
        ("record:rewritten", "write", "a slot that holds a live record is written"),
        ("move:overlapping", "move", "a slot is moved from and to"),
        ("retire:twice", "retire", "a slot is named twice"),
        ("buffers:two", slots, "two buffers of records"),
        ("step:wrapped", f"{described} {logging} {slots} seal", "more than 39 bits"),
        ("owner:wrapped", f"{planning} write {slots}", "more than 24 bits"),
        (
            "rows:apart",
            f"{described} {holding} {slots} {segments}",
            "a table's rows are longer than what is used",
        ),
        (
            "rows:giant",
            f"{described} {holding} {slots} {segments}",
            "a tensor spans more than 2**31 elements",
        ),
        ("slots:list", sealing, "slots are named"),
        ("slots:range", sealing, "they are those of the pool, in order"),
        ("span:piece", sealing, "some of them are taken"),
        ("scales:given", sealing, "scales lie in buffers of their own"),
        ("bands:one", sealing, "a seal is one word"),
        ("bands:several", sealing, "it is several"),
        ("lists:given", "verify_seals", "several lists are counted apart"),
        ("band:wide", sealing, "each may be of several layers"),
        ("seal:fresh", "seal", "slots whose records a step has written are sealed"),
        ("tile:write", "write", "a segment is longer than a tile"),
        ("tile:chain", chaining, "a segment is longer than a tile"),
        ("tile:scatter", "scatter_token_ids", "a segment is longer than a tile"),
        ("tile:verify", checking, "more entries than a tile has"),
        ("tile:entries", "plan", "more entries than a tile has"),
        ("tile:requests", described, "more requests than a tile has"),
        ("tile:slots", slots, "more slots than a tile has"),
        ("tile:edge", f"{checking} {rows} {slots}", "a length within one of a multiple of the tile"),
    ]
    within_op = {"rows:giant", "layout:short", "slot:twice", "move:overlapping", "retire:twice"}
    # Engines do not seal.
    within_op |= {name for name, ops, _ in table if set(ops.split()) <= set(sealing.split())}
    exclusive = {"batch", "slots", "bands"}
    return {
        name: Feature(
            name=name,
            ops=frozenset(ops.split()),
            doc=doc,
            within_op=name in within_op or name.startswith("tile:"),
            exclusive=name.partition(":")[0] in exclusive,
        )
        for name, ops, doc in table
    }


FEATURES: Mapping[str, Feature] = _features()

# Pairs that no case has, and why; hostile values can make calls of one round contradict each other, and then may.
INFEASIBLE: tuple[tuple[str, str, str], ...] = (
    ("batch:empty", "tile:write", "no live request, no segment"),
    ("batch:empty", "segment:empty", "no live request, no segment"),
    ("batch:empty", "starts:later", "no live request, no segment"),
    ("batch:empty", "slot:trash", "no live request, no token"),
    ("batch:empty", "record:rewritten", "no live request, no token"),
    ("batch:empty", "slot:twice", "no live request, no token"),
    ("tokens:kept", "tokens:shifted", "tokens that stand elsewhere are kept by another op"),
    *(
        (batch, verified, "no live request with a prefix, nothing to verify")
        for batch in ("batch:empty", "batch:fresh")
        for verified in ("tile:entries", "tile:verify", "capacity:truncated", "sharing:prefix", "slot:unmapped")
    ),
    ("batch:fresh", "starts:later", "without a prefix there is nothing to bring up"),
    ("batch:decode", "tile:write", "every segment is one token"),
    ("batch:mixed", "requests:one", "it takes several"),
    ("sharing:prefix", "requests:one", "it takes several"),
    ("tile:requests", "requests:one", "it takes several"),
    ("source:none", "layout:short", "without a source no slot is missing in one"),
    ("ring:none", "ring:full", "one log serves all calls of an engine"),
    ("ring:none", "ring:room", "one log serves all calls of an engine"),
)


@cache
def why_infeasible(first: str, second: str) -> str:
    """Return why no case has both features, or "" where one can."""
    a, b = FEATURES[first], FEATURES[second]
    if a.exclusive and a.axis == b.axis:
        return f"values of {a.axis} are alternatives"
    for left, right, reason in INFEASIBLE:
        if {left, right} == {first, second}:
            return reason
    if not a.ops & b.ops and (a.within_op or b.within_op):
        return "no op has both, and one of them concerns an op's own work"
    return ""


@cache
def feasible_pairs() -> frozenset[Pair]:
    """Return the pairs of features that a case can have, each in alphabetical order."""
    pairs = itertools.combinations(sorted(FEATURES), 2)
    return frozenset(pair for pair in pairs if not why_infeasible(*pair))


@dataclass(eq=False)
class Coverage:
    """Counts of the cases that had each feature and each pair; a case is a call, or all calls of an engine's round."""

    cases: int = 0
    features: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)

    def add(self, *calls: Iterable[str]) -> None:
        """Count one case, given as the features of its call, or of each of its calls."""
        known = [{name for name in call if name in FEATURES} for call in calls]
        everywhere = {name for names in known for name in names}
        across = {name for name in everywhere if not FEATURES[name].within_op}
        self.cases += 1
        self.features.update(everywhere)
        self.pairs.update({pair for names in (across, *known) for pair in _pairs(names)})

    def merge(self, other: Coverage) -> None:
        """Count the cases of `other` too."""
        self.cases += other.cases
        self.features.update(other.features)
        self.pairs.update(other.pairs)

    def gaps(self) -> list[Pair]:
        """Return the feasible pairs that no case had."""
        return sorted(feasible_pairs() - set(self.pairs))

    def summary(self) -> str:
        """Return how much is covered, in a line."""
        feasible = feasible_pairs()
        infeasible = len(FEATURES) * (len(FEATURES) - 1) // 2 - len(feasible)
        covered = len(feasible & set(self.pairs))
        return f"{covered} of {len(feasible)} feasible pairs covered by {self.cases} cases, {infeasible} infeasible"

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values, for `from_json`."""
        return {
            "cases": self.cases,
            "features": dict(sorted(self.features.items())),
            "pairs": {" ".join(pair): n for pair, n in sorted(self.pairs.items())},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        pairs: Counter[Pair] = Counter()
        for names, n in data["pairs"].items():
            first, second = names.split(" ")
            pairs[first, second] = n
        return cls(cases=data["cases"], features=Counter(data["features"]), pairs=pairs)

    def table(self) -> Table:
        """Return a table for people: each feature, its cases, and the features it has never met."""
        missing: dict[str, list[str]] = {name: [] for name in FEATURES}
        for first, second in self.gaps():
            missing[first].append(second)
            missing[second].append(first)
        table = Table("feature", "cases", "met", "never met", title=self.summary())
        for name in FEATURES:
            possible = sum(name in pair for pair in feasible_pairs())
            met = f"{possible - len(missing[name])}/{possible}"
            table.add_row(name, str(self.features[name]), met, ", ".join(missing[name]))
        return table


def _pairs(names: Iterable[str]) -> Iterator[Pair]:
    """Yield the pairs of `names`, but for two alternatives of one axis."""
    for pair in itertools.combinations(sorted(names), 2):
        first, second = FEATURES[pair[0]], FEATURES[pair[1]]
        if not (first.exclusive and first.axis == second.axis):
            yield pair

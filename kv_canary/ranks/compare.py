"""The comparison of what ranks have of the same requests."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, IntEnum, IntFlag
from typing import Any

import torch

from kv_canary.constants import HEAD_OF_CHAIN, MASK64
from kv_canary.errors import printable
from kv_canary.redact import Redactor


class Word(IntEnum):
    """The words of a line: what one rank has of one request in one group."""

    KEY = 0
    PREFIX_LEN = 1
    FLAGS = 2
    TAIL = 3
    SEED_SLOT = 4
    SEED_CHAIN = 5
    ENTRIES = 6
    VIOLATIONS = 7


class Flag(IntFlag):
    """Flags that a rank sets for a request."""

    # The engine threw this request's result away: what lies in its slots may be another's by now.
    DISCARDED = 1
    # The forward itself wrote over the seed, as a ring does with more new tokens than its window.
    SEED_GONE = 2


class RankDifference(Enum):
    """Ways in which a rank stands out; the values say why it may."""

    REQUESTS = "the ranks did not run the same requests in this step"
    PREFIX_LEN = "the ranks disagree on how much of the request is cached: a prefix hit of another length"
    TAIL = "the ranks were given other tokens, or another identity, for the same request"
    NOT_LOADED = "the prefix was never loaded there: a load or transfer that reached only some ranks"
    OTHER_KV = "its slots hold another prefix: a load, a copy or a table that went wrong on some ranks only"
    VIOLATIONS = "corruption on some ranks only, which their own reports describe"


@dataclass(frozen=True, kw_only=True)
class RankStand:
    """The state of a request on one rank.

    Args:
        rank: its number within the group of ranks.
        differences: how it stands out, by name; empty where it does not.
        prefix_len: tokens it has in the cache; None where it did not run the request, and the rest is None too.
        tail: the chain of that prefix, from the request's own tokens.
        seed_slot: slot of the prefix's last position; HEAD_OF_CHAIN where there is no such position to be read.
        seed_chain: the chain that the record there holds, 0 where nothing was ever written; None where not read.
        entries: positions verified before the forward.
        violations: found in this step.
    """

    rank: int
    differences: tuple[str, ...] = ()
    prefix_len: int | None = None
    tail: int | None = None
    seed_slot: int | None = None
    seed_chain: int | None = None
    entries: int | None = None
    violations: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Ranks that differ on one request in one step.

    Args:
        step: the step.
        key: number of the request, the same on every rank.
        request_id: its name; None where this rank does not know it.
        groups: the buffer groups in which the ranks differ.
        ranks: those that stand out; all of them where they differ and no majority says who is right.
        differences: how, by name.
        stands: what each rank has, in the first of the groups.
        cause: the likely cause.
        sentence: all of it for a person.
    """

    step: int
    key: int
    request_id: str | None
    groups: tuple[str, ...]
    ranks: tuple[int, ...]
    differences: tuple[str, ...]
    stands: tuple[RankStand, ...]
    cause: str
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return asdict(self)


def compare(
    ranks: Mapping[int, torch.Tensor],
    *,
    step: int,
    groups: Sequence[str],
    names: Mapping[int, str],
    steps_match: bool = True,
    redactor: Redactor | None = None,
) -> list[RankReport]:
    """Return a report for every request on which ranks differ, in the order of the first rank's requests.

    Args:
        ranks: int64 [groups, requests, 8] lines of each rank; a key of 0 ends a group's.
        step: that the lines are of.
        groups: names of the buffer groups.
        names: name of each request that this rank knows, by key.
        steps_match: whether the ranks have surely run the same step; if not, they are compared only where they have run
            the same requests from the same prefixes.
        redactor: hides names and chains; None: they are told.
    """
    if len(ranks) < 2 or _equal(ranks):
        return []
    lines = {rank: [_by_key(part) for part in words.tolist()] for rank, words in ranks.items()}
    if not steps_match and len({_shape(groups_of) for groups_of in lines.values()}) > 1:
        return []
    # In the order in which they stand, each once.
    keys = dict.fromkeys(key for groups_of in lines.values() for group in groups_of for key in group)
    reports = []
    for key in keys:
        found: dict[str, list[RankStand]] = {}
        # Violations are counted by request, not by group, and so are the entries that they are held against.
        verified = {r: sum(g[key][Word.ENTRIES] for g in groups_of if key in g) for r, groups_of in lines.items()}
        for i, group in enumerate(groups):
            stands = _stands({rank: groups_of[i].get(key) for rank, groups_of in lines.items()}, verified)
            if any(stand.differences for stand in stands):
                found[group] = stands
        if found:
            name = names.get(key)
            if redactor is not None:
                found = {group: [_hidden(s, redactor) for s in stands] for group, stands in found.items()}
                name, key = redactor.name(name), redactor.word(key)
            reports.append(_report(step, key, name, found))
    return reports


# What healthy ranks have in common. Slots may differ, and so may entries: a GPU's stride is chosen by its own clock.
_COMMON = [Word.KEY, Word.PREFIX_LEN, Word.TAIL, Word.SEED_CHAIN, Word.VIOLATIONS]


def _equal(ranks: Mapping[int, torch.Tensor]) -> bool:
    first, *others = (words[..., _COMMON] for words in ranks.values())
    return all(torch.equal(first, other) for other in others)


def _by_key(lines: Sequence[list[int]]) -> dict[int, list[int]]:
    return {line[Word.KEY]: line for line in lines if line[Word.KEY]}


def _shape(groups_of: Sequence[Mapping[int, Sequence[int]]]) -> frozenset[tuple[int, int, int]]:
    return frozenset(
        (i, key, line[Word.PREFIX_LEN]) for i, group in enumerate(groups_of) for key, line in group.items()
    )


def _stands(lines: Mapping[int, list[int] | None], verified: Mapping[int, int]) -> list[RankStand]:
    """Return what each rank has of one request in one group, and how it stands out.

    Args:
        lines: of each rank; None where it did not run the request.
        verified: how many entries of the request each rank has verified in all groups.
    """
    there = {rank: line for rank, line in lines.items() if line is not None}
    found: dict[int, list[RankDifference]] = {rank: [] for rank in lines}

    def note(difference: RankDifference, ranks: Sequence[int]) -> None:
        for rank in ranks:
            found[rank].append(difference)

    if there and not any(line[Word.FLAGS] & Flag.DISCARDED for line in there.values()):
        note(RankDifference.REQUESTS, _odd({rank: rank in there for rank in lines}))
        prefixes = _odd({rank: line[Word.PREFIX_LEN] for rank, line in there.items()})
        note(RankDifference.PREFIX_LEN, prefixes)
        if not prefixes:
            # Of other prefixes the tails are others too.
            note(RankDifference.TAIL, _odd({rank: line[Word.TAIL] for rank, line in there.items()}))
        tails = {(line[Word.PREFIX_LEN], line[Word.TAIL]) for line in there.values()}
        seeds = {rank: _seed(line, tails) for rank, line in there.items()}
        if len({(seed, line[Word.SEED_CHAIN]) for seed, line in zip(seeds.values(), there.values(), strict=True)}) > 1:
            for rank, seed in seeds.items():
                if seed is not None:
                    note(seed, [rank])
        if not any(found.values()):
            # Who verified less, with a longer stride, may have found nothing because it has not looked there yet.
            looked = max((verified[rank] for rank, line in there.items() if not line[Word.VIOLATIONS]), default=-1)
            hit = [rank for rank, line in there.items() if line[Word.VIOLATIONS] and verified[rank] <= looked]
            note(RankDifference.VIOLATIONS, hit)
    return [_stand(rank, line, found[rank]) for rank, line in lines.items()]


def _seed(line: Sequence[int], tails: set[tuple[int, int]]) -> RankDifference | None:
    """Return what is wrong with the record that the request's next token goes on from."""
    if line[Word.SEED_SLOT] == HEAD_OF_CHAIN or line[Word.FLAGS] & Flag.SEED_GONE:
        return None
    if not line[Word.SEED_CHAIN]:
        return RankDifference.NOT_LOADED
    # Where the ranks' tails differ, a seed that is as another rank says is right, and its own rank's tail is wrong.
    return None if (line[Word.PREFIX_LEN], line[Word.SEED_CHAIN]) in tails else RankDifference.OTHER_KV


def _odd(values: Mapping[int, object]) -> list[int]:
    """Return the ranks whose value is not that of the majority: none if all agree, all if there is no majority."""
    value, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        return list(values)
    return [rank for rank, other in values.items() if other != value]


def _stand(rank: int, line: Sequence[int] | None, differences: Sequence[RankDifference]) -> RankStand:
    names = tuple(d.name for d in differences)
    if line is None:
        return RankStand(rank=rank, differences=names)
    read = line[Word.SEED_SLOT] != HEAD_OF_CHAIN and not line[Word.FLAGS] & Flag.SEED_GONE
    return RankStand(
        rank=rank,
        differences=names,
        prefix_len=line[Word.PREFIX_LEN],
        tail=line[Word.TAIL] & MASK64,
        seed_slot=line[Word.SEED_SLOT],
        seed_chain=line[Word.SEED_CHAIN] & MASK64 if read else None,
        entries=line[Word.ENTRIES],
        violations=line[Word.VIOLATIONS],
    )


def _hidden(stand: RankStand, redactor: Redactor) -> RankStand:
    """Return what a rank has without the chains, from which tokens could be found."""
    tail, seed = (None if word is None else redactor.word(word) for word in (stand.tail, stand.seed_chain))
    return dataclasses.replace(stand, tail=tail, seed_chain=seed)


def _report(step: int, key: int, request_id: str | None, found: Mapping[str, Sequence[RankStand]]) -> RankReport:
    stands = tuple(next(iter(found.values())))
    ranks = sorted({s.rank for part in found.values() for s in part if s.differences})
    names = [d for d in RankDifference if any(d.name in s.differences for part in found.values() for s in part)]
    groups = tuple(found)
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {' and '.join(map(str, ranks))}"
    differ = "differs" if len(ranks) == 1 else "differ"
    cause = "; ".join(d.value for d in names)
    request = f"request {printable(request_id)}" if request_id is not None else "a request that this rank does not have"
    sentence = (
        f"step {step}: {who} of {len(stands)} {differ} on {request} in "
        f"{' and '.join(groups)}: {' + '.join(d.name for d in names)}. "
        f"{'; '.join(map(_describe, stands))}. Likely: {cause}."
    )
    return RankReport(
        step=step,
        key=key,
        request_id=request_id,
        groups=groups,
        ranks=tuple(ranks),
        differences=tuple(d.name for d in names),
        stands=stands,
        cause=cause,
        sentence=sentence,
    )


def _describe(stand: RankStand) -> str:
    """Return what a rank has, for a person."""
    head = f"Rank {stand.rank}"
    if stand.differences:
        head += f" ({' + '.join(stand.differences)})"
    if stand.prefix_len is None:
        return f"{head} did not run it"
    text = f"{head} has {stand.prefix_len} tokens cached, of chain {stand.tail:016x}"
    if stand.seed_chain is not None:
        holds = f"chain {stand.seed_chain:016x}" if stand.seed_chain else "nothing"
        text += f", and its slot {stand.seed_slot} holds {holds}"
    return f"{text} ({stand.entries} verified, violations: {stand.violations})"

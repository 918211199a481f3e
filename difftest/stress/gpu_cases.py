"""The cases of a proof on a GPU, as their results are written, compared and held against what was planted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton

# What a case's result holds for comparison alone.
LONG = ("prompts", "tokens")
# What two lives that were scheduled alike have in common: the digest of what each step was given, and who was given up.
SCHEDULE = ("schedule", "given_up")
# How far below the likeliest token another may lie that rounding chooses as well, in standard deviations of the logits:
# kernels on a GPU multiply float32 by ten bits of the mantissa, and other batches are added up in another order.
ROUNDING = 0.01


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result, if there is a file for it."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def like_transformers(folder: Path, served: Mapping[str, Any]) -> dict[str, int]:
    """Count the requests whose tokens are what transformers finds the likeliest, by the same weights."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder).eval()
    alike = 0
    for name, tokens in served["tokens"].items():
        prompt = served["prompts"][name]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        alike += logits.argmax(-1).tolist() == tokens
    return {"requests": len(served["tokens"]), "alike": alike}


def compared(watched: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the tokens of requests that both lives have served of one prompt, as far as both have gone.

    Where no two lives are scheduled alike, another request may be given up, and what comes behind it go on from there.

    Returns:
        How many requests were compared, and in how many tokens; the names of those that differ, each with the first
        token in which it does; how many went further in one life than in the other; and whether both lives were
        scheduled alike.
    """
    mine, others = watched["tokens"], plain.get("tokens", {})
    alike = [name for name in mine if name in others and watched["prompts"][name] == plain["prompts"].get(name)]
    differ, tokens = [], 0
    for name in alike:
        pairs = list(zip(mine[name], others[name], strict=False))
        tokens += len(pairs)
        differ += [[name, i] for i, (a, b) in enumerate(pairs) if a != b][:1]
    return {
        "requests": len(alike),
        "tokens": tokens,
        "differ": differ,
        "cut short": sum(len(mine[name]) != len(others[name]) for name in alike),
        "scheduled alike": all(plain.get(key) == watched.get(key) for key in SCHEDULE),
    }


def below_the_likeliest(folder: Path, watched: Mapping[str, Any], plain: Mapping[str, Any]) -> list[float]:
    """Return how far below the likeliest token the lesser of two lies, where two lives differ first, by transformers.

    Where two lives are not scheduled alike, their batches round in other ways, which decides between tokens that are as
    likely as each other. What somebody else's KV brings is not near.

    Args:
        folder: of the model's weights, which are served in float32.
        watched: a life.
        plain: the other one.

    Returns:
        In standard deviations of the logits, for each request that `compared` says differs, in its order.
    """
    differ = compared(watched, plain)["differ"]
    if not differ:
        return []
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder).eval()
    found = []
    for name, i in differ:
        ids = watched["prompts"][name] + watched["tokens"][name][:i]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        lesser = min(logits[watched["tokens"][name][i]], logits[plain["tokens"][name][i]])
        found.append(round(float((logits.max() - lesser) / logits.std()), 5))
    return found


def fault_checks(watched: Mapping[str, Any]) -> dict[str, bool]:
    """Return what has to hold where something was planted for one forward: where, when and why it was found."""
    planted, reports = watched["planted"], watched["reports"]
    if planted is None:
        return {"planted": False}
    places, where = {tuple(place) for place in planted["places"]}, planted.get("where", "HEAD")
    # What is found between forwards is nobody's.
    whose = (planted["request"],) if where == "HEAD" else (planted["request"], None, "")
    there = [r for r in reports if r["tag"].startswith(where) and r["request"] in whose]
    seen = {(r["position"], r["slot"]) for r in there}
    return {
        f"found at {where}": places <= seen,
        "at once": bool(reports) and {r["step"] for r in reports} == {planted["step"]},
        "for the reason": all(set(r["reasons"]) & set(planted["reasons"]) for r in reports),
        # Others may share the place; what stands behind a changed place has another predecessor.
        "nothing else": all(r["position"] in planted["touched"] for r in reports),
    }


def uncovered(source: Any, position: int) -> tuple[int, int]:
    """Return a layer and a byte of a token's in it that no record holds a fingerprint of.

    Args:
        source: `KvSource` of the token's pool.
        position: of the token.
    """
    covered, _, _ = source.coverage(position)
    return len(source.layers) - (2 if covered == len(source.layers) - 1 else 1), source.bytes_per_token // 2


def writes_checks(summary: Mapping[str, Any]) -> dict[str, bool]:
    """Return what has to hold where all that the model hands over is held against what it has written."""
    writes = summary["writes"]
    return {
        "writes taken in": writes is not None and writes["slots"] > 0,
        "of every forward": writes is not None and not writes["unknown"],
    }


def compiled_from_here() -> list[str]:
    """Return a list that every kernel of the canary's is added to that Triton comes to compile in this process.

    Those that it takes from its cache on the disk are among them: with an empty one they would be compiled. What was
    compiled before is not, and where Triton interprets nothing is.
    """
    found: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(**told: Any) -> Any:
        if told["fn"].module.startswith("kv_canary."):
            found.append(told["repr"])
        return None if before is None else before(**told)

    triton.knobs.runtime.jit_post_compile_hook = hook
    return found

"""`kv-canary stress`: campaigns on engines, healthy ones and ones with faults."""

from __future__ import annotations

import click

from kv_canary.commands.group import LazyGroup

CAMPAIGNS = ("chaos", "detection", "overlap", "ranks", "seals", "soak", "transfer")


@click.group(
    cls=LazyGroup,
    elsewhere={
        **{name: f"kv_canary.difftest.stress.{name}:main" for name in CAMPAIGNS},
        "sglang": "kv_canary.difftest.stress.sglang.detection:main",
        "sglang-tiers": "kv_canary.difftest.stress.sglang.tiers:main",
        "vllm-tiers": "kv_canary.difftest.stress.vllm.tiers:main",
        "vllm": "kv_canary.difftest.stress.vllm.detection:main",
        "vllm-churn": "kv_canary.difftest.stress.vllm.churn:main",
    },
)
def stress() -> None:
    """Let engines live, healthy and with faults, and see what the canary says.

    Needs a checkout: an installed package does not hold the campaigns.

    \b
    Examples:
      kv-canary stress soak --jobs 2
      kv-canary stress detection --mode real_kv_used --runs 20
    """

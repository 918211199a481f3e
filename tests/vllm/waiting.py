"""A request that what was brought for cannot be scheduled: others have filled the pool meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from kv_canary.difftest.stress.vllm.engine import VOCABULARY, Engine


def serve_held_up(engine: Engine, prompt: Sequence[int], *, is_given_up: bool) -> None:
    """Serve a prompt, hold up who has it brought, and serve another one that finds it in the prefix cache.

    Args:
        engine: see `hold_up`; one whose connector brings what was served before.
        prompt: likewise.
        is_given_up: whether the request that was held up is aborted.
    """
    engine.submit("first", prompt, new_tokens=4)
    engine.run()
    engine.llm.reset_prefix_cache()
    hold_up(engine, "held up", prompt)
    if is_given_up:
        engine.abort("held up")
    engine.submit("second", prompt, new_tokens=4)
    engine.run()


def hold_up(engine: Engine, name: str, prompt: Sequence[int]) -> None:
    """Submit a prompt of which five blocks are brought, and step until they are there and no block is left for more.

    Args:
        engine: whose pool is empty, and tight; what is brought comes after some 40 steps.
        name: of the request.
        prompt: of six blocks.
    """
    scheduler = engine.scheduler
    for n, (length, tokens) in enumerate(((290, 60), (250, 100))):
        other = [(11 * k + n) % VOCABULARY + 3 for k in range(length)]
        engine.submit(f"other {n}", other, new_tokens=tokens)
    engine.run(lambda: len(scheduler.running) == 2 and all(r.num_output_tokens > 1 for r in scheduler.running))
    engine.submit(name, prompt, new_tokens=4)
    engine.step()
    [its] = [request for request in scheduler.requests.values() if request not in scheduler.running]
    assert its.status.name == "WAITING_FOR_REMOTE_KVS"
    engine.run(lambda: its.status.name != "WAITING_FOR_REMOTE_KVS")
    assert its.status.name == "WAITING"

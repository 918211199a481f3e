"""A KV connector of vLLM's that keeps full blocks of prompts in this process and brings them back, and its mistakes.

vLLM's own connectors want a GPU, a network or a server. This one has what the canary has to live with: KV that comes
before a forward or while its request waits, in blocks that were handed out for it, by any number of groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

# Steps between the one that begins to bring something for a request that waits and the one behind which it is there.
_DELAY = 2


@dataclass
class Store:
    """What a connector has, on both of its sides.

    Attributes:
        blocks: content by the tokens up to a block's end: bytes of each layer.
        brought: tokens that were brought.
        fault: what goes wrong with the next block that is brought; "" for nothing.
        victim: block that is written to by mistake.
        hurt: the request that suffered, once something went wrong.
        late: what is written to a layer's block after it was said to be there, and the steps until then.
    """

    blocks: dict[tuple[int, ...], dict[str, torch.Tensor]] = field(default_factory=dict)
    brought: int = 0
    fault: str = ""
    victim: int = 0
    hurt: str = ""
    late: list[tuple[int, torch.Tensor, int, torch.Tensor]] = field(default_factory=list)


# By the name that a configuration gives.
STORES: dict[str, Store] = {}


def settings(store: str, *, waits: bool) -> dict[str, Any]:
    """Return vLLM's `kv_transfer_config` for a connector with a store.

    Args:
        store: its name; it begins empty.
        waits: whether requests wait for what is brought, or their first forward does.
    """
    STORES[store] = Store()
    return {
        "kv_connector": "Loopback",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "waits": waits},
    }


@dataclass
class _Block:
    """A block of a request: its key, and where it is, by group."""

    request: str
    key: tuple[int, ...]
    ids: Sequence[int]


@dataclass
class _Jobs(KVConnectorMetadata):  # type: ignore[misc]
    """What a step is to bring and to keep."""

    load: list[_Block] = field(default_factory=list)
    save: list[_Block] = field(default_factory=list)


class Loopback(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector; see `settings`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._store, self._waits = STORES[extra["store"]], bool(extra["waits"])
        self._size = int(vllm_config.cache_config.block_size)
        self._group_of = {
            name: g for g, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names
        }
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._layers: dict[str, torch.Tensor] = {}
        self._requests: dict[str, Any] = {}
        self._load: list[_Block] = []
        self._manager: Any = None
        # Blocks that a request had when it was asked for more.
        self._local: dict[str, int] = {}
        # Requests whose KV is on the way, with the steps that are left; blocks that could not be brought, by request.
        self._under_way: dict[str, int] = {}
        self._failed: dict[str, set[int]] = {}

    # The side of the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        # The last token of a prompt is computed here, so that there is something to sample from.
        last = (len(request.prompt_token_ids) - 1) // self._size
        first = block = num_computed_tokens // self._size
        while block < last and self._key(request, block) in self._store.blocks:
            block += 1
        self._local[request.request_id] = first
        return (block - first) * self._size, self._waits and block > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first, groups = self._local.pop(request.request_id, 0), blocks.get_block_ids()
        for n in range(first, first + num_external_tokens // self._size):
            self._load.append(_Block(request.request_id, self._key(request, n), [ids[n] for ids in groups]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        jobs, self._load = _Jobs(load=self._load), []
        begun = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        begun |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, computed in begun.items():
            request, groups = self._requests[name], self._manager.get_block_ids(name)
            end = min(computed + scheduler_output.num_scheduled_tokens[name], len(request.prompt_token_ids))
            for n in range(computed // self._size, end // self._size):
                ids = [of[n] for of in groups]
                if all(ids):
                    jobs.save.append(_Block(name, self._key(request, n), ids))
        return jobs

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def _key(self, request: Any, block: int) -> tuple[int, ...]:
        tokens: Iterable[int] = request.prompt_token_ids[: (block + 1) * self._size]
        return tuple(tokens)

    # The side of a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = {
            name: layer.movedim(list(layer.shape).index(self._num_blocks), 0) for name, layer in kv_caches.items()
        }

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        jobs: Any = self._get_connector_metadata()
        late, self._store.late = self._store.late, []
        for left, layer, block, content in late:
            if left:
                self._store.late.append((left - 1, layer, block, content))
            else:
                layer[block] = content
        for load in jobs.load:
            self._bring(load)
            if self._waits:
                self._under_way[load.request] = _DELAY

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        jobs: Any = self._get_connector_metadata()
        for save in jobs.save:
            self._store.blocks[save.key] = {
                name: layer[save.ids[self._group_of[name]]].clone() for name, layer in self._layers.items()
            }

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        self._under_way = {name: left - 1 for name, left in self._under_way.items()}
        done = {name for name, left in self._under_way.items() if left <= 0}
        for name in done:
            del self._under_way[name]
        return None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        told = [name for name in self._failed if name not in self._under_way]
        return {block for name in told for block in self._failed.pop(name)}

    def _bring(self, block: _Block) -> None:
        store = self._store
        fault, content = store.fault, store.blocks[block.key]
        store.brought += self._size
        if fault:
            store.fault, store.hurt = "", block.request
        for number, (name, layer) in enumerate(self._layers.items()):
            to = block.ids[self._group_of[name]]
            if fault == "fails":
                self._failed.setdefault(block.request, set()).add(to)
            if not to or fault in ("lost", "fails") or (fault == "layer" and number == len(self._layers) - 1):
                continue
            if fault == "late":
                store.late.append((_DELAY + 1 if self._waits else 0, layer, to, content[name]))
            elif fault == "stray":
                layer[store.victim] = content[name]
                layer[to] = content[name]
            else:
                layer[to] = content[name]

"""A canary in trouble: it is shown forwards without lengths on the host, and its own launches fail now and then."""

from __future__ import annotations

import itertools
from typing import Any


def apply() -> None:
    """Show it no lengths at every fifth forward, and let every 17th write fail."""
    from kv_canary import ops
    from kv_canary.engines.sglang import batches

    forwards, writes = itertools.count(1), itertools.count(1)
    lengths, write = batches.lengths, ops.write

    def sometimes_unknown(forward_batch: Any) -> Any:
        if next(forwards) % 5:
            return lengths(forward_batch)
        raise batches.UnknownKindError("a forward whose lengths are not on the host")

    def sometimes_failing(*args: Any, **kwargs: Any) -> Any:
        if next(writes) % 17:
            return write(*args, **kwargs)
        raise RuntimeError("a launch of the canary's own has failed")

    batches.lengths = sometimes_unknown
    ops.write = sometimes_failing

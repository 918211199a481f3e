"""What is replaced in an engine's classes, and the collector that takes one of its objects meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from kv_canary.engines.patches import Patches, _Dispatcher


class Model:
    """A model that refers to itself, as modules do that know who holds them."""

    def __init__(self) -> None:
        self.me = self

    def generate(self) -> int:
        return 1


def _watch(model: Model) -> None:
    Patches().wrap_in_class(model, "generate", lambda original: original() + 1)


def test_a_model_that_the_collector_takes_while_another_one_is_watched_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Known(weakref.WeakKeyDictionary[type, Any]):
        def setdefault(self, *args: Any) -> Any:
            gc.collect()
            return super().setdefault(*args)

    own, known = vars(Model)["generate"], Known()
    monkeypatch.setattr(_Dispatcher, "_known", known)
    gone = Model()
    _watch(gone)
    there = weakref.ref(gone)
    gc.disable()
    try:
        del gone
        model = Model()
        # Otherwise the test itself would hang.
        thread = threading.Thread(target=_watch, args=(model,), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    finally:
        gc.enable()
    assert there() is None
    assert model.generate() == 2
    assert Model().generate() == 1
    del model
    gc.collect()
    assert vars(Model)["generate"] is own

"""Stands in for torchvision, which SGLang and transformers import with their image models and never use for text.

The index's torchvision is a CUDA build: beside a CPU build of torch its compiled part does not load, and importing it
fails. Here every name below `torchvision` can be imported, and raises when it is called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__version__ = "0.28.0"
# Makes it a package, which its submodules need.
__path__: list[str] = []


class Missing:
    """What any name stands for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("torchvision is a stand-in here")


class InterpolationMode:
    """The names of the modes, which are defaults of arguments."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _missing(name: str) -> type[Missing]:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing


def _submodule(name: str) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}")
    module.__path__ = []
    module.__getattr__ = _missing  # type: ignore[method-assign]
    module.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    parent, _, child = module.__name__.rpartition(".")
    setattr(sys.modules[parent], child, module)
    return module


for _name in ("io", "ops", "utils", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _submodule(_name)

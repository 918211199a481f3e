"""The compiler that is never called."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class NoCompiler(BaseBackend):
    """Compiles for no target."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return False

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise NotImplementedError("kernels are interpreted here")

    def add_stages(self, stages: dict[str, Any], options: object, *args: Any) -> None:
        raise NotImplementedError("kernels are interpreted here")

    def load_dialects(self, context: object) -> None:
        raise NotImplementedError("kernels are interpreted here")

    def get_module_map(self) -> dict[str, Any]:
        return {}

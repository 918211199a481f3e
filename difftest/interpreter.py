"""Triton's interpreter, made quicker: it looks through Triton's language once in a process, and not at every launch.

A launch puts the interpreter's functions in the place of the language's, and takes them back when it is over; every
call of a device function within it does the first again. Both look for what there is to replace, which takes longer
than the kernels of most calls do, and find the same each time. Every value that a kernel computes gets a type, whose
shape is checked, wrapped and written out again; there are few shapes, and what comes of one is kept. Sums, differences
and products of 32 bits are computed once more in 64, to see whether they overflow, which nobody looks at where nothing
is debugged.
"""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

_ABSENT = object()


class _Replaced:
    """The language as the interpreter wants it, for as long as a launch is under way in any thread.

    Args:
        found: what is replaced: the object, the attribute's name, and the value that it gets.
    """

    def __init__(self, found: list[tuple[Any, str, Any]]) -> None:
        self._found = found
        self._before: list[tuple[Any, str, Any]] = []
        self._lock, self._launches = threading.Lock(), 0

    def replace(self, _kernel: Any) -> _Replaced:
        """Replace it; `restore` takes it back. In the place of the interpreter's `_patch_lang`."""
        with self._lock:
            self._launches += 1
            if self._launches == 1:
                self._before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in self._found]
                for owner, name, value in self._found:
                    setattr(owner, name, value)
        return self

    def restore(self) -> None:
        with self._lock:
            self._launches -= 1
            if not self._launches:
                for owner, name, value in self._before:
                    if value is _ABSENT:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, value)


def quicken() -> None:
    """Make Triton's interpreter quicker in this process; does nothing where it is not built as it is expected to be."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope") or isinstance(
        getattr(interpreter._patch_lang, "__self__", None), _Replaced
    ):
        return
    # All that any function may see of the language: by the name that a kernel gives it, and by Triton's own.
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    places = {(id(owner), name): (owner, name) for owner, name, _ in scope._changes}
    found = [(owner, name, vars(owner)[name]) for owner, name in places.values()]
    scope.restore()
    interpreter._patch_lang = _Replaced(found).replace

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
    _keep_shapes(tl.core)
    _keep_dtypes(interpreter)
    _leave_out_overflows(interpreter.interpreter_builder)


def _keep_shapes(core: Any) -> None:
    """Let types of blocks and values take over what was made of their shape the first time."""
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    of_types: dict[tuple[int, ...] | None, tuple[Any, Any, str]] = {}
    of_values: dict[tuple[int, ...] | None, tuple[Any, Any]] = {}

    def sizes_of(shape: Any) -> tuple[int, ...] | None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        # What is equal to an integer and none is for Triton to judge.
        return tuple(sizes) if {type(size) for size in sizes} <= {int} else None

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = sizes_of(shape) if isinstance(shape, list | core.tuple) else None
        if sizes in of_types:
            self.element_ty = element_ty
            self.shape, self.numel, text = of_types[sizes]
            self.name = f"<{text}, {element_ty}>"
        else:
            make_type(self, element_ty, shape)
            if sizes is not None:
                of_types[sizes] = self.shape, self.numel, str(self.shape)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = sizes_of(type.shape) if type.is_block() else ()
        if sizes in of_values:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = of_values[sizes]
        else:
            make_value(self, handle, type)
            if sizes is not None:
                of_values[sizes] = self.shape, self.numel

    # The first ones are made as ever, the second ones of what was kept; they must have the same in them.
    types = [vars(core.block_type(core.int32, [4, 2]))]
    values = [vars(core.tensor(None, of)) for of in (core.block_type(core.int32, [4, 2]), core.int64)]
    for _ in range(2):
        made = core.block_type.__new__(core.block_type)
        block_type(made, core.int32, [4, 2])
        types.append(vars(made))
        for of in (made, core.int64):
            value = core.tensor.__new__(core.tensor)
            tensor(value, None, of)
            values.append(vars(value))
    if types[0] == types[1] == types[2] and values[:2] == values[2:4] == values[4:]:
        core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _keep_dtypes(interpreter: Any) -> None:
    """Let NumPy's type for one of Triton's be looked up among all of them once."""
    look_up, known = interpreter._get_np_dtype, {}

    def np_dtype(of: Any) -> Any:
        scalar = of.scalar
        # A pointer's name does not say all of it.
        name = "pointer" if scalar.is_ptr() else scalar.name
        if name not in known:
            known[name] = look_up(of)
        return known[name]

    interpreter._get_np_dtype = np_dtype


def _leave_out_overflows(builder: Any) -> None:
    """Have no overflow looked for, as Triton's compilers do, where that could stop nothing: only debugging asserts."""
    options = builder.options
    names = {field.name for field in dataclasses.fields(options)} if dataclasses.is_dataclass(options) else set()
    if "sanitize_overflow" in names and not getattr(options, "debug", True):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)

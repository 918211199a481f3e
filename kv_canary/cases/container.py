"""The container of a case file, which is what `torch.save` writes: an archive of a pickle and of the bytes of tensors.

A pickle is a program. `torch.load(weights_only=True)` runs a part of that language, in which a file of a hundred bytes
can still ask for any amount of memory (`bytearray(1 << 36)`). Here the few instructions that plain values and flat
tensors need are read by hand: nothing is called, nothing is imported, and what is made is no larger than the file.
"""

from __future__ import annotations

import pickletools
import sys
import zipfile
from collections.abc import Callable
from typing import IO, Any

import torch

# The directory of the archive, and the pickle in it: a call of ten thousand tensors has less.
MOST_STRUCTURE_BYTES = 4 << 20
# Of a tensor.
MOST_DIMENSIONS = 16

_STORAGES = {"torch ByteStorage": torch.uint8, "torch LongStorage": torch.int64}
_DTYPES = {f"torch {name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_REBUILD, _ORDERED = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"


def read_container(file: IO[bytes], *, most_bytes: int, tensors: bool = True) -> Any:
    """Return the plain values and the flat tensors (uint8 or int64, on the CPU) in a container.

    Args:
        file: open at its beginning, and seekable.
        most_bytes: how many bytes of tensors it may hold.
        tensors: whether they are read; else None stands in the place of each.

    Raises:
        Exception: it is none, or a damaged one. Which exception depends on the damage: the caller names it.
    """
    bounded = _Bounded(file)
    with zipfile.ZipFile(bounded) as archive:  # type: ignore[arg-type]
        bounded.most = max(most_bytes, MOST_STRUCTURE_BYTES)
        roots = [name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise ValueError(f"a container holds one data.pkl, not {len(roots)}")
        pickle = _record(archive, f"{roots[0]}data.pkl", most=MOST_STRUCTURE_BYTES)
        order = f"{roots[0]}byteorder"
        if order in archive.NameToInfo and _record(archive, order, most=16) != sys.byteorder.encode():
            raise ValueError(f"its numbers are not {sys.byteorder}-endian")
        return _Reader(_Storages(archive, roots[0], most_bytes) if tensors else None).read(bytes(pickle))


class _Bounded:
    """A file of which no single read is longer than `most`: `zipfile` reads a directory of any length at once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.most = MOST_STRUCTURE_BYTES
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > self.most:
            raise ValueError(f"a read of {size} bytes, where {self.most} are the most")
        return self._file.read(self.most if size < 0 else size)


def _record(archive: zipfile.ZipFile, name: str, *, most: int, limit: str = "a fixed limit") -> bytearray:
    """Return a record of the archive, which is stored as it is and has the checksum that the archive says."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"{name} is compressed")
    if info.file_size > most:
        raise ValueError(f"{name} has {info.file_size} bytes, where {most} are left ({limit})")
    with archive.open(info) as record:
        # One byte more than there is: the checksum is compared at the end.
        content = bytearray(record.read(info.file_size + 1))
    if len(content) != info.file_size:
        raise ValueError(f"{name} ends too early")
    return content


class _Storages:
    """The bytes of tensors, each read once, `most_bytes` in all."""

    def __init__(self, archive: zipfile.ZipFile, root: str, most_bytes: int) -> None:
        self._archive, self._root, self._left = archive, root, most_bytes
        self._read: dict[str, torch.Tensor] = {}

    def get(self, key: str) -> torch.Tensor:
        if key not in self._read:
            content = _record(self._archive, f"{self._root}data/{key}", most=self._left, limit="--max-gib")
            self._left -= len(content)
            whole = torch.frombuffer(content, dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)
            self._read[key] = whole
        return self._read[key]


class _Name:
    """A global that the pickle names: a kind of storage, or one of the two functions that stand before a tensor."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Storage:
    """A storage that the pickle refers to; without bytes where tensors are not read."""

    def __init__(self, dtype: torch.dtype, values: torch.Tensor | None) -> None:
        self.dtype, self.values = dtype, values


class _Reader:
    """Reads the pickle, instruction by instruction.

    A list or a dictionary stands in one place only: what is returned is a tree, no larger than the pickle that it came
    from. Keys are strings: a key is hashed, and the hash of a tuple in a tuple in a tuple can exhaust the stack.
    """

    def __init__(self, storages: _Storages | None) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, pickle: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _VALUES:
                self._stack.append(argument)
            elif opcode.name in _PUTS:
                self._memo[_index(argument)] = self._stack[-1]
            elif opcode.name in _GETS:
                self._stack.append(_shareable(self._memo[_index(argument)]))
            elif opcode.name in _STEPS:
                _STEPS[opcode.name](self, argument)
            else:
                raise ValueError(f"instruction {opcode.name} is none of a case file's")
        if self._marks or len(self._stack) != 1:
            raise ValueError("the pickle does not end with one value")
        return self._stack.pop()

    def proto(self, version: int) -> None:
        if version != 2:
            raise ValueError(f"a pickle of protocol 2 is read, not {version}")

    def stop(self, _: None) -> None:
        """End of the pickle: `genops` yields nothing further."""

    def mark(self, _: None) -> None:
        self._marks.append(len(self._stack))

    def empty_list(self, _: None) -> None:
        self._stack.append([])

    def empty_dict(self, _: None) -> None:
        self._stack.append({})

    def append(self, _: None) -> None:
        self._extend(self._pop(1))

    def appends(self, _: None) -> None:
        self._extend(self._pop_mark())

    def set_item(self, _: None) -> None:
        self._update(self._pop(2))

    def set_items(self, _: None) -> None:
        self._update(self._pop_mark())

    def tuple_1(self, _: None) -> None:
        self._stack.append(tuple(self._pop(1)))

    def tuple_2(self, _: None) -> None:
        self._stack.append(tuple(self._pop(2)))

    def tuple_3(self, _: None) -> None:
        self._stack.append(tuple(self._pop(3)))

    def tuple_n(self, _: None) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def name(self, name: str) -> None:
        if name in _DTYPES:
            self._stack.append(_DTYPES[name])
        elif name in _STORAGES or name in (_REBUILD, _ORDERED):
            self._stack.append(_Name(name))
        else:
            raise ValueError(f"{name[:80]!r} is no name of a case file's")

    def storage(self, _: None) -> None:
        kind, storage, key, _device, length = _tuple(self._pop(1)[0], 5)
        if kind != "storage" or not isinstance(storage, _Name) or storage.name not in _STORAGES:
            raise ValueError("a storage is of bytes or of 64-bit integers")
        dtype = _STORAGES[storage.name]
        if not isinstance(key, str) or not key.isascii() or not key.isdigit() or type(length) is not int:
            raise ValueError("a storage has a number for its name, and a length")
        values = None
        if self._storages is not None:
            values = self._storages.get(key)
            if len(values) != length * dtype.itemsize:
                raise ValueError(f"a storage of {length} elements of {dtype} has {len(values)} bytes")
            values = values.view(dtype)
        self._stack.append(_Storage(dtype, values))

    def call(self, _: None) -> None:
        function, arguments = self._pop(2)
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise ValueError("a case file calls nothing")
        if function.name == _ORDERED and not arguments:
            # The hooks of a tensor: there are none.
            self._stack.append(())
        elif function.name == _REBUILD:
            self._stack.append(_flat_tensor(*_tuple(arguments, 6)))
        else:
            raise ValueError("a case file calls nothing")

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) - (self._marks[-1] if self._marks else 0) < count:
            raise ValueError("an instruction lacks its values")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _pop_mark(self) -> list[Any]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("values are appended to what is no list")
        target.extend(values)

    def _update(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(values) % 2 or not all(type(key) is str for key in values[::2]):
            raise ValueError("a dictionary has strings for keys, and a value for each")
        target.update(zip(values[::2], values[1::2], strict=True))


def _flat_tensor(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any) -> Any:
    """Return the part of a storage that a flat tensor is; None where tensors are not read."""
    if not isinstance(storage, _Storage) or requires_grad is not False or hooks != ():
        raise ValueError("a tensor is made of a storage, plain and without hooks")
    (length,), (step,) = _tuple(size, 1), _tuple(stride, 1)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (offset, length, step)) or (step != 1 and length > 1):
        raise ValueError("a tensor has one dimension, without gaps")
    if storage.values is None:
        return None
    if offset + length > len(storage.values):
        raise ValueError("a tensor lies outside its storage")
    return storage.values[offset : offset + length]


def _shareable(value: Any) -> Any:
    """Return what may stand in several places: what holds nothing, or the few numbers of a shape."""
    few = isinstance(value, tuple) and len(value) <= MOST_DIMENSIONS and all(type(n) is int for n in value)
    if isinstance(value, list | dict | tuple) and not few:
        raise ValueError("one value stands in several places")
    return value


def _index(argument: object) -> int:
    if type(argument) is not int:
        raise ValueError("a place is a number")
    return argument


def _tuple(value: Any, length: int) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or len(value) != length:
        raise ValueError(f"{length} values must stand here")
    return value


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    "PROTO": _Reader.proto,
    "STOP": _Reader.stop,
    "MARK": _Reader.mark,
    "EMPTY_LIST": _Reader.empty_list,
    "EMPTY_DICT": _Reader.empty_dict,
    "APPEND": _Reader.append,
    "APPENDS": _Reader.appends,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "TUPLE1": _Reader.tuple_1,
    "TUPLE2": _Reader.tuple_2,
    "TUPLE3": _Reader.tuple_3,
    "TUPLE": _Reader.tuple_n,
    "GLOBAL": _Reader.name,
    "BINPERSID": _Reader.storage,
    "REDUCE": _Reader.call,
}

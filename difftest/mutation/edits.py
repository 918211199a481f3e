"""The small changes that can be made to a source: where each one is, and the text that it puts there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

# Never mutated, because a change there changes speed or nothing (docstrings, annotations, decorators and imports are
# left out as well): how work is cut into programs and blocks, words whose change is refused before anything runs, and
# what a load puts into lanes that its mask leaves out, which next to nobody reads.
TUNING_NAMES = frozenset(
    {
        *("BLOCK_ENTRIES", "BLOCK_REQUESTS", "BLOCK_SLOTS", "BLOCK_TOKENS", "TILE_TOKENS", "MAX_BLOCK_WORDS"),
        *("PROGRAMS_PER_SM", "INTERPRETER_PROGRAMS", "grid", "parts", "tiles", "block", "block_words"),
        *("FEW_ENTRIES", "INTERPRETER_ENTRIES", "ONE_PROGRAM_LANES", "INTERPRETER_LANES", "COUNTED_REQUESTS"),
        *("TILES", "TILES_AT_ONCE", "INTERPRETER_TILES", "at_once", "LANE_TOKENS", "MAX_LANES", "lays_out", "lanes"),
        *("ONE_PROGRAM_BYTES", "NARROW_BYTES", "NARROW_TILE", "WIDE_WORDS", "WIDE_REGISTERS", "MAX_REQUESTS"),
        *("FEW_REQUESTS", "OTHERS", "FEW_OTHERS", "INTERPRETER_OTHERS", "BANDS_AT_ONCE", "NUM_WARPS"),
    }
)
TUNING_KEYWORDS = frozenset({"num_warps", "maxnreg", "axis", "dim", "dtype", "device", "other"})
# Calls whose first argument is a shape.
SHAPE_CALLS = frozenset({"zeros", "full", "empty", "view"})


class Kind(StrEnum):
    """The kind of change that a mutant makes."""

    CONSTANT = "constant"
    COMPARISON = "comparison"
    LOGIC = "and/or"
    ARITHMETIC = "arithmetic"
    DROPPED_OPERAND = "dropped operand"
    WEAKER_MASK = "weaker mask"
    SWAPPED = "swapped operands"
    MIN_MAX = "min/max, any/all"
    TILE = "shifted tile"
    SCAN = "scan order"
    CONDITION = "condition"
    DROPPED_STATEMENT = "dropped statement"
    ASSIGNMENT = "augmented assignment"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Put `text` in place of bytes [start, end) of a source."""

    kind: Kind
    start: int
    end: int
    text: str


_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str, Kind]] = {
    ast.BitAnd: ("&", "|", Kind.LOGIC),
    ast.BitOr: ("|", "&", Kind.LOGIC),
    ast.BitXor: ("^", "|", Kind.LOGIC),
    ast.Add: ("+", "-", Kind.ARITHMETIC),
    ast.Sub: ("-", "+", Kind.ARITHMETIC),
    ast.Mult: ("*", "+", Kind.ARITHMETIC),
    ast.Div: ("/", "*", Kind.ARITHMETIC),
    ast.Pow: ("**", "*", Kind.ARITHMETIC),
    ast.FloorDiv: ("//", "%", Kind.ARITHMETIC),
    ast.Mod: ("%", "//", Kind.ARITHMETIC),
    ast.LShift: ("<<", ">>", Kind.ARITHMETIC),
    ast.RShift: (">>", "<<", Kind.ARITHMETIC),
}
_MIN_MAX = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "any": "all", "all": "any"}
# Statements that only call something, for what it does to memory.
_EFFECTS = frozenset(
    {
        *("store", "atomic_add", "atomic_or", "zero_", "add_", "store_record", "store_status"),
        *("report", "_check_seeds", "_report_seeds", "_store_tile", "check_entries", "lay_out"),
        *("leave_counts", "advance_chain"),
    }
)
# Calls that only tell people something.
_TOLD = frozenset({"debug", "info", "warning", "error", "exception", "log"})


class Source:
    """A parsed source, which knows where its nodes stand in the text.

    Args:
        text: of the source.
        runtime: whether it is plain Python, whose methods, conditions, switches and calls are changed too.
    """

    def __init__(self, text: str, *, runtime: bool = False) -> None:
        self.runtime = runtime
        self.data = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[end_line - 1] + end_column

    def text(self, node: ast.expr) -> str:
        """The node's text, in parentheses unless it binds tightest anyway."""
        start, end = self.span(node)
        text = self.data[start:end].decode()
        tight = isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript)
        return text if tight else f"({text})"

    def apply(self, edit: Edit) -> str:
        return (self.data[: edit.start] + edit.text.encode() + self.data[edit.end :]).decode()

    def parses(self, edit: Edit) -> bool:
        """Whether the source is still Python with `edit`, of which only the top-level statement around it is asked."""
        spans = (self.span(top) for top in self.tree.body)
        start, end = next((start, end) for start, end in spans if start <= edit.start and edit.end <= end)
        text = self.data[start : edit.start] + edit.text.encode() + self.data[edit.end : end]
        try:
            ast.parse(text)
        except SyntaxError:
            return False
        return True

    def changed_lines(self, edit: Edit) -> tuple[int, str, str]:
        """The number of the first line that `edit` touches, and the touched lines' text before and after it."""
        first = max(i for i, start in enumerate(self.starts) if start <= edit.start)
        end = min(start for start in self.starts if start >= edit.end)
        head, tail = self.data[self.starts[first] : edit.start], self.data[edit.end : end]
        before = self.data[self.starts[first] : end].decode()
        after = head.decode() + edit.text + tail.decode()
        return first + 1, " ".join(before.split()), " ".join(after.split())

    def edits(self) -> Iterator[tuple[str, ast.stmt, list[Edit]]]:
        """Every statement with the edits of it, and the name of the top-level function that it is in."""
        for name, top in self._tops():
            masks = _mask_definitions(top) if isinstance(top, ast.FunctionDef) else {}
            inner = [n for n in ast.walk(top) if isinstance(n, ast.stmt) and not isinstance(n, ast.FunctionDef)]
            for statement in sorted(inner, key=lambda n: n.lineno):
                edits = [edit for node in _mutable(statement) for edit in self._edits_of(node, masks)]
                if self.runtime:
                    edits += [edit for node in _mutable(statement) for edit in self._runtime_edits_of(node)]
                yield name, statement, edits

    def _tops(self) -> Iterator[tuple[str, ast.stmt]]:
        """Yield the statements to change, with the name of the function or method that each is, or "<module>"."""
        for top in self.tree.body:
            if isinstance(top, ast.FunctionDef):
                yield top.name, top
            elif isinstance(top, ast.Assign | ast.AnnAssign):
                yield "<module>", top
            elif isinstance(top, ast.ClassDef) and self.runtime:
                yield from ((f"{top.name}.{n.name}", n) for n in top.body if isinstance(n, ast.FunctionDef))

    def _runtime_edits_of(self, node: ast.AST) -> Iterator[Edit]:
        """Yield what plain Python has besides: switches, conditions, calls for an effect, attributes that are set."""
        match node:
            case ast.Constant(value=bool() as value):
                yield self._replace(node, Kind.CONSTANT, str(not value))
            case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Name):
                yield self._replace(test, Kind.CONDITION, f"(not ({self.text(test)}))")
            case ast.Expr(value=ast.Call() as call) if _called(call) not in _EFFECTS | _TOLD:
                yield self._replace(node, Kind.DROPPED_STATEMENT, "pass")
            case ast.Assign(targets=[ast.Attribute()]):
                yield self._replace(node, Kind.DROPPED_STATEMENT, "pass")

    def _edits_of(self, node: ast.AST, masks: dict[str, ast.BinOp]) -> Iterator[Edit]:
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                # Of a wide mask the highest bit counts as well, elsewhere the neighbour.
                values = [value + 1] if value == 0 else [value - 1] if value < 1 << 16 else [value >> 1]
                yield from (self._replace(node, Kind.CONSTANT, str(v)) for v in values)
            case ast.Compare():
                yield from self._comparison(node)
            case ast.BoolOp():
                word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield self._between(left, right, Kind.LOGIC, word, other)
                for dropped in node.values:
                    kept = [self.text(value) for value in node.values if value is not dropped]
                    yield self._replace(node, Kind.DROPPED_OPERAND, "(" + f" {word} ".join(kept) + ")")
            case ast.BinOp():
                yield from self._operation(node)
            case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
                if not isinstance(operand, ast.Constant):
                    yield self._replace(node, Kind.CONDITION, self.text(operand))
            case ast.IfExp(test=ast.Name() as test) | ast.If(test=ast.Name() as test):
                yield self._replace(test, Kind.CONDITION, f"(not {test.id})")
            case ast.Call():
                yield from self._call(node, masks)
            case ast.stmt():
                yield from self._statement(node)

    def _comparison(self, node: ast.Compare) -> Iterator[Edit]:
        operands = [node.left, *node.comparators]
        for i, operator in enumerate(node.ops):
            yield self._between(operands[i], operands[i + 1], Kind.COMPARISON, *_COMPARISONS[type(operator)])
        if len(node.ops) > 1:
            # A chain is a range check: each of its sides can be missing.
            (start, _), (_, end) = self.span(operands[0]), self.span(operands[-1])
            inner = self.span(operands[1])[0], self.span(operands[-2])[1]
            yield Edit(kind=Kind.DROPPED_OPERAND, start=start, end=inner[0], text="")
            yield Edit(kind=Kind.DROPPED_OPERAND, start=inner[1], end=end, text="")
        elif isinstance(node.ops[0], ast.Lt | ast.Gt) and not any(isinstance(o, ast.Constant) for o in operands):
            sign = _COMPARISONS[type(node.ops[0])][0]
            yield self._replace(node, Kind.SWAPPED, f"{self.text(operands[1])} {sign} {self.text(operands[0])}")

    def _operation(self, node: ast.BinOp) -> Iterator[Edit]:
        sign, other, kind = _OPERATORS[type(node.op)]
        sides = (node.left, node.right)
        literal = any(isinstance(side, ast.Constant) for side in sides)
        # Where a number is added, the number itself is mutated.
        if not (literal and isinstance(node.op, ast.Add | ast.Sub)):
            yield self._between(*sides, kind, sign, other)
        if isinstance(node.op, ast.Sub) and not literal and self.text(node.left) != self.text(node.right):
            yield self._replace(node, Kind.SWAPPED, f"({self.text(node.right)} - {self.text(node.left)})")
        if isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor):
            # In a chain `a & b & c`, which nests to the left, each operand is left out once.
            nested = isinstance(node.left, ast.BinOp) and type(node.left.op) is type(node.op)
            for kept in (node.left,) if nested else sides:
                if not isinstance(kept, ast.Constant) and not (isinstance(kept, ast.Name) and kept.id.isupper()):
                    yield self._replace(node, Kind.DROPPED_OPERAND, self.text(kept))

    def _call(self, node: ast.Call, masks: dict[str, ast.BinOp]) -> Iterator[Edit]:
        name = _called(node)
        if name in _MIN_MAX and (len(node.args) > 1 or name in ("any", "all") or isinstance(node.func, ast.Attribute)):
            _, end = self.span(node.func)
            yield Edit(kind=Kind.MIN_MAX, start=end - len(name), end=end, text=_MIN_MAX[name])
        if name == "clamp" and node.keywords:
            start, _ = self.span(node.keywords[0].value)
            yield Edit(kind=Kind.MIN_MAX, start=start - 4, end=start - 1, text=_MIN_MAX[node.keywords[0].arg or ""])
        if name == "where" and len(node.args) == 3:
            (start, _), (_, end) = self.span(node.args[1]), self.span(node.args[2])
            swapped = f"{self.text(node.args[2])}, {self.text(node.args[1])}"
            yield Edit(kind=Kind.SWAPPED, start=start, end=end, text=swapped)
        if name == "range" and len(node.args) > 1:
            yield self._replace(node.args[0], Kind.TILE, f"{self.text(node.args[0])} + 1")
        if name in ("range", "static_range", "arange") and len(node.args) < 3:
            last = node.args[-1]
            if name != "arange" and not isinstance(last, ast.Constant):
                yield self._replace(last, Kind.TILE, f"{self.text(last)} - 1")
        elif name == "range":
            yield self._replace(node.args[2], Kind.TILE, f"{self.text(node.args[2])} + 1")
        if name == "cumsum":
            yield from self._scan(node)
        for keyword in node.keywords:
            if keyword.arg == "mask" and isinstance(keyword.value, ast.Name):
                mask = keyword.value
                if mask.id in masks:
                    yield self._replace(mask, Kind.WEAKER_MASK, self.text(_weakest(masks[mask.id])))
                elif name == "store":
                    yield self._replace(mask, Kind.WEAKER_MASK, f"{mask.id} == {mask.id}")

    def _scan(self, node: ast.Call) -> Iterator[Edit]:
        start, end = self.span(node)
        whole = self.data[start:end].decode()
        if (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "tl"
        ):
            scanned = self.text(node.args[0])
            backwards = f"{whole[:-1]}, reverse=True)"
        else:
            scanned = self.text(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            backwards = f"{scanned}.flip(0).cumsum(0).flip(0)"
        yield self._replace(node, Kind.SCAN, backwards)
        yield self._replace(node, Kind.SCAN, f"({whole} - {scanned})")

    def _statement(self, node: ast.stmt) -> Iterator[Edit]:
        match node:
            case ast.Expr(value=ast.Call() as call) if _called(call) in _EFFECTS:
                yield self._replace(node, Kind.DROPPED_STATEMENT, "pass")
            case ast.AugAssign():
                yield self._replace(node, Kind.DROPPED_STATEMENT, "pass")
                (_, start), (end, _) = self.span(node.target), self.span(node.value)
                yield Edit(kind=Kind.ASSIGNMENT, start=start, end=end, text=" = ")
            case ast.Assign(targets=[ast.Subscript()]):
                yield self._replace(node, Kind.DROPPED_STATEMENT, "pass")
            case ast.Assign(targets=[ast.Name(id=name)]) if name in _names(node.value):
                yield self._replace(node, Kind.DROPPED_STATEMENT, "pass")
            case ast.Continue():
                yield self._replace(node, Kind.DROPPED_STATEMENT, "pass")

    def _replace(self, node: ast.expr | ast.stmt, kind: Kind, text: str) -> Edit:
        start, end = self.span(node)
        return Edit(kind=kind, start=start, end=end, text=text)

    def _between(self, left: ast.expr, right: ast.expr, kind: Kind, sign: str, other: str) -> Edit:
        """Replace the operator `sign`, which stands between `left` and `right`."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = start + self.data[start:end].index(sign.encode())
        return Edit(kind=kind, start=at, end=at + len(sign), text=other)


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of one statement that may be mutated, in the order of the source: the one exclusion rule."""
    children = list(ast.iter_child_nodes(node))
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) if name in TUNING_NAMES:
            return
        case ast.Assign(targets=[ast.Tuple(elts=names)]) if TUNING_NAMES.issuperset(
            getattr(n, "id", "") for n in names
        ):
            return
        case ast.Expr(value=ast.Constant()) | ast.List() | ast.JoinedStr():
            return
        case ast.keyword(arg=name) if name in TUNING_KEYWORDS:
            return
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            children = [v for k, v in pairs if not (isinstance(k, ast.Constant) and k.value in TUNING_KEYWORDS)]
        case ast.AnnAssign():
            children = [node.value] if node.value is not None else []
        case ast.Call() if _called(node) in SHAPE_CALLS:
            children = [child for child in children if child not in node.args[:1]]
    yield node
    for child in children:
        if not isinstance(child, ast.stmt):
            yield from _mutable(child)


def _called(node: ast.Call) -> str:
    """The last name of what is called: `store` of `tl.store`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _names(node: ast.expr) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _mask_definitions(function: ast.FunctionDef) -> dict[str, ast.BinOp]:
    """The conjunctions `name = a & b ...` of a function, by name."""
    found = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.BitAnd()) as value):
                found[name] = value
    return found


def _weakest(mask: ast.expr) -> ast.expr:
    """The first operand of a conjunction."""
    while isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd):
        mask = mask.left
    return mask

"""How far an output of an op may lie from the reference's, where equal bytes cannot be asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kv_canary.errors import must_be

# Given what the reference left and what came, in the output's shape; returns which elements agree.
Comparator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """A distance that an output may have from the reference's, for sums in another order and the like.

    An element agrees where its bits are equal, or any of these says so:

    Args:
        atol, rtol: it lies within `atol + rtol * |expected|`, as `torch.isclose` has it, in float64.
        ulp: it lies within so many representable values of the output's dtype; of integers, within that difference.
        equal_nan: NaN agrees with NaN.
        comparator: instead of all these: is given both outputs, and returns a mask of the elements that agree.
        repeatable: whether the same launch must leave the same bits each time; False for sums by atomics.

    Raises:
        ValueError: a number is negative or not a number, or a comparator is beside others.
    """

    atol: float = 0.0
    rtol: float = 0.0
    ulp: int = 0
    equal_nan: bool = True
    comparator: Comparator | None = None
    repeatable: bool = True

    def __post_init__(self) -> None:
        for name in ("atol", "rtol", "ulp"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(must_be("Tolerance", name, "a number, at least 0", repr(value)))
        if self.comparator is not None and (self.atol or self.rtol or self.ulp):
            raise ValueError(must_be("Tolerance", "comparator", "given without atol, rtol and ulp", "both"))

    def __str__(self) -> str:
        if self.comparator is not None:
            return getattr(self.comparator, "__name__", "a comparator")
        named = ((name, getattr(self, name)) for name in ("atol", "rtol", "ulp"))
        return ", ".join(f"{name} {value:g}" for name, value in named if value) or "equal values"

    def agree(self, expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return which elements agree, as a mask of their shape.

        Raises:
            ValueError: the comparator returned something else.
        """
        if self.comparator is not None:
            mask = self.comparator(expected, got)
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != expected.shape:
                shown = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
                needed = f"a bool for each of {list(expected.shape)} elements"
                raise ValueError(must_be("Tolerance", "what comparator returns", needed, shown))
            return mask
        wide = torch.complex128 if expected.dtype.is_complex else torch.float64
        if not expected.dtype.is_floating_point and not expected.dtype.is_complex and not self.rtol:
            # In integers, of which float64 does not hold all.
            return distance(expected, got) <= max(int(self.atol), self.ulp)
        mask = torch.isclose(got.to(wide), expected.to(wide), rtol=self.rtol, atol=self.atol, equal_nan=self.equal_nan)
        if self.ulp:
            mask |= distance(expected, got) <= self.ulp
        return mask


def distance(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return how many representable values lie from one to the other, each; of NaN and infinities, the most there are.

    Raises:
        TypeError: of complex numbers there is no order.
    """
    if expected.dtype.is_complex:
        raise TypeError(must_be("Tolerance", "ulp", "of real numbers", str(expected.dtype)))
    first, second = _in_order(expected), _in_order(got)
    apart = torch.where(first >= second, first - second, second - first)
    # From far below 0 to far above, an int64 overflows.
    apart = torch.where(apart < 0, _MOST, apart)
    if expected.dtype.is_floating_point:
        wide = expected.to(torch.float64), got.to(torch.float64)
        finite = wide[0].isfinite() & wide[1].isfinite()
        apart = torch.where(finite | (wide[0] == wide[1]), apart, _MOST)
    return apart


_MOST = torch.iinfo(torch.int64).max
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of the values, one apart where these are neighbours; 0 and -0 are the same."""
    if not values.dtype.is_floating_point:
        return values.to(torch.int64)
    dtype = _INTEGERS[values.element_size()]
    bits = values.contiguous().view(dtype).to(torch.int64)
    magnitude = bits & torch.iinfo(dtype).max
    return torch.where(bits < 0, -magnitude, magnitude)

"""The integer fields of masks, checked: when a mask is made, and when it meets the plane of a call."""

from typing import Any

import numpy as np

from .errors import explain
from .given import is_concrete, kind_of
from .mask_algebra import Mask
from .sides import POSITION_LIMIT, Plane

INT32 = (-(2**31), 2**31 - 1)
REACH = (1 - POSITION_LIMIT, POSITION_LIMIT - 1)  # of a window: what added to a position cannot wrap


def integers(mask: Mask, name: str, ends: Any = INT32, *, required: bool = False, rows: bool = False) -> Any:
    """A field checked: None, a Python int, or an integer array (with a row axis if `rows`)."""
    value: Any = getattr(mask, name)
    kind, is_array = kind_of(value), hasattr(value, "dtype")
    if kind == "NoneType" and not required:
        return None
    field = f"{type(mask).__name__}({name}=...)"
    if kind not in "iu" or (rows and np.ndim(value) == 0):
        wanted = "an integer array with one entry per row" if rows else "an int or an integer array"
        given = f"{value.dtype}{value.shape}" if is_array else repr(value)
        remedy = "Make an array of it: np.asarray(...)." if kind in ("list", "tuple") else ""
        raise TypeError(explain("mask", f"{field} must be {wanted}.", {name: given}, remedy))
    if is_concrete(value) and np.size(value) and not (ends[0] <= np.min(value) and np.max(value) <= ends[1]):
        rule, remedy = f"{field} must lie between {ends[0]} and {ends[1]}.", "None: no limit." if ends == REACH else ""
        raise ValueError(explain("mask", rule, {name: value}, remedy))
    return value.astype(np.int32) if is_array else value


def check_each(mask: Mask, name: str, plane: Plane) -> None:
    """One number per call, or one per example."""
    value = getattr(mask, name)
    if np.ndim(value):
        plane.check_batch(f"{type(mask).__name__}({name}=...)", np.shape(value))


def check_rows(mask: Mask, name: str, plane: Plane, rows: int) -> None:
    """One entry per row, `(T,)` or batch axes + `(T,)`."""
    value = getattr(mask, name)
    if value is None:
        return
    if value.shape[-1] != rows:
        rule = f"{type(mask).__name__}({name}=...) must have one entry per row."
        raise ValueError(explain("mask", rule, {f"{name} ids": value.shape, "rows": rows}))
    if value.ndim > 1:
        plane.check_batch(f"{type(mask).__name__}({name}=...)", value.shape[:-1])

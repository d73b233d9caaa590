"""Device library functions (``libdevice``) by NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter

from .access import Array

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "acos": np.arccos, "asin": np.arcsin, "atan": np.arctan, "atan2": np.arctan2,
    "cbrt": np.cbrt, "ceil": np.ceil, "copysign": np.copysign, "cos": np.cos, "cosh": np.cosh,
    "erf": interpreter.np_erf_fp64, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
    "fabs": np.abs, "fast_exp": np.exp, "fast_log": np.log, "floor": np.floor, "fmax": np.fmax,
    "fmin": np.fmin, "fmod": np.fmod, "hypot": np.hypot, "log": np.log, "log10": np.log10,
    "log1p": np.log1p, "log2": np.log2, "max": np.maximum, "min": np.minimum, "pow": np.power,
    "rint": np.rint, "nearbyint": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin,
    "sinh": np.sinh, "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc,
}  # fmt: skip


def extern_elementwise(symbol: str, args: list[Array]) -> Array:
    """Value of a device library function.

    Raises:
        NotImplementedError: it has no emulation.
    """
    name = re.sub(r"^(__nv_|__ocml_)|(_f16|_f32|_f64)$", "", symbol)
    function = _FUNCTIONS.get(name)
    if function is None and name.endswith("f"):
        function = _FUNCTIONS.get(name[:-1])
    if function is None:
        raise NotImplementedError(f"device library function {symbol!r} has no CPU emulation")
    return np.asarray(function(*args))

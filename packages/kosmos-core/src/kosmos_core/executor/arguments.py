"""Kernel arguments: from host values to what the interpreted kernel receives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.jit import TensorWrapper, _normalize_ty, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from .numerics import Handle
from .twins import Function

# Launch options of triton's backends: accepted and ignored.
_OPTIONS = frozenset(
    (
        "allow_flush_denorm", "allowed_dot_input_precisions", "arch", "backend_name",
        "cluster_dims", "debug", "default_dot_input_precision",
        "deprecated_fp8_dot_operand_dtypes", "enable_fp_fusion", "enable_reflect_ftz",
        "extern_libs", "fpsan_homomorphic_casts", "instrumentation_mode", "ir_override", "kpack",
        "launch_cluster", "launch_cooperative_grid", "launch_pdl", "matrix_instr_nonkdim",
        "max_num_imprecise_acc_default", "maxRegAutoWS", "maxnreg", "minRegAutoWS",
        "num_buffers_warp_spec", "num_consumer_groups", "num_ctas", "num_stages", "num_warps",
        "ptx_options", "ptx_version", "reg_dec_producer", "reg_inc_consumer",
        "sanitize_overflow", "schedule_hint", "supported_fp8_dtypes", "waves_per_eu",
        "warp_size",
    )
)  # fmt: skip
_pointer_types: dict[torch.dtype, Any] = {}


class Signature:
    """Parameters of a kernel.

    Args:
        fn: its Python function.
    """

    def __init__(self, fn: Function) -> None:
        self._signature = inspect.signature(fn)
        self._name = fn.__qualname__
        self.constexprs = {
            name
            for name, p in self._signature.parameters.items()
            if p.annotation is not inspect.Parameter.empty
            and _normalize_ty(p.annotation) == "constexpr"
        }

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults filled in, launch options left out.

        Raises:
            TypeError: unknown or missing argument.
        """
        names = self._signature.parameters
        unknown = [k for k in kwargs if k not in names and k not in _OPTIONS]
        if unknown:
            raise TypeError(
                f"{self._name}: unknown keyword argument {unknown[0]!r}: neither a parameter nor "
                "a launch option of triton"
            )
        try:
            mine = {k: v for k, v in kwargs.items() if k in names}
            bound = self._signature.bind(*args, **mine)
        except TypeError as e:
            raise TypeError(f"{self._name}: {e}") from None
        bound.apply_defaults()
        return {k: plain(v) for k, v in bound.arguments.items()}


def plain(value: Any) -> Any:
    """The value of a `tl.constexpr`, everything else as it is."""
    return value.value if isinstance(value, tl.constexpr) else value


class Converter:
    """Converts host values.

    Args:
        semantic: triton's front end on the executor's builder.
        register: called with every tensor and its name.
    """

    def __init__(self, semantic: Any, register: Callable[[torch.Tensor, str], None]) -> None:
        self._semantic = semantic
        self._register = register

    def convert(self, value: Any, name: str) -> Any:
        """What the kernel sees of a (non-constexpr) argument.

        Tensors become pointers, numbers scalars of the types the compiler gives them; tuples and
        NamedTuples are converted item by item; a `tl.constexpr` inside them becomes its value.

        Raises:
            TypeError: a kind of value that kernels cannot take.
        """
        if isinstance(value, tl.constexpr):
            return value.value
        if value is None or isinstance(value, (str, tl.dtype)):
            return value
        if isinstance(value, (bool, np.bool_)):
            return _scalar(value, np.bool_, tl.int1)
        if isinstance(value, (int, np.integer)):
            return _integer(int(value), name)
        if isinstance(value, (float, np.floating)):
            return _scalar(value, np.float32, tl.float32)
        if isinstance(value, TensorDescriptor):
            return self._descriptor(value, name)
        if isinstance(value, TensorWrapper):
            self._register(value.base, name)
            return _pointer(value.data_ptr(), _pointer_type(value))
        if isinstance(value, torch.Tensor):
            self._register(value, name)
            return _pointer(value.data_ptr(), _pointer_type(value))
        if isinstance(value, tuple):
            fields = getattr(value, "_fields", None)
            labels = fields if fields is not None else range(len(value))
            items = [self.convert(v, f"{name}.{k}") for k, v in zip(labels, value, strict=True)]
            return type(value)(*items) if fields is not None else tuple(items)
        if hasattr(value, "data_ptr"):
            return _pointer(value.data_ptr(), tl.str_to_ty(mangle_type(value), None))
        if callable(value):
            return value
        raise TypeError(f"kernel argument {name}: cannot pass a {type(value).__name__}")

    def _descriptor(self, value: TensorDescriptor, name: str) -> Any:
        strides: list[Any] = [self.convert(s, name) for s in value.strides]
        strides[-1] = tl.constexpr(1)
        out = self._semantic.make_tensor_descriptor(
            base=self.convert(value.base, name),
            shape=[self.convert(s, name) for s in value.shape],
            strides=strides,
            block_shape=[tl.constexpr(b) for b in value.block_shape],
            padding_option=value.padding,
        )
        if getattr(value, "round_f32_to_tf32", False):
            out.handle.round_f32_to_tf32 = True
        return out


def _scalar(value: Any, dtype: Any, ty: Any) -> Any:
    return tl.tensor(Handle(np.array([value], dtype), ty), ty)


def _integer(value: int, name: str) -> Any:
    if -(2**31) <= value < 2**31:
        return _scalar(value, np.int32, tl.int32)
    if -(2**63) <= value < 2**63:
        return _scalar(value, np.int64, tl.int64)
    if 0 <= value < 2**64:
        return _scalar(value, np.uint64, tl.uint64)
    raise TypeError(f"kernel argument {name}: integer {value} does not fit in 64 bits")


def _pointer_type(value: Any) -> Any:
    ty = _pointer_types.get(value.dtype)
    if ty is None:
        ty = _pointer_types[value.dtype] = tl.str_to_ty(mangle_type(value), None)
    return ty


def _pointer(address: int, ty: Any) -> Any:
    return tl.tensor(Handle(np.array([address], np.uint64), ty), ty)

"""What `check` compares: kernels with torchao's results, with FP64, and with one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from kosmos_core.device.target import AMD, NVIDIA

from kosmos_mx import reference
from kosmos_mx.cli import vectors
from kosmos_mx.cli.corpus import corpus
from kosmos_mx.formats import E4M3, FORMATS, SCALE_DTYPE, SCALINGS, Format
from kosmos_mx.ops.dequantize import dequantize
from kosmos_mx.ops.gemm import LAYOUTS, mx_gemm
from kosmos_mx.ops.quantize import quantize, swiglu_quantize
from kosmos_mx.tensor import MXTensor

PATHS = {"conversion": int(NVIDIA.value), "integer": int(AMD.value)}
# Rounding of an FP32 sum over the contraction, relative to the sum of magnitudes.
GEMM_LIMIT = 1e-5
RAGGED = ((1, 1), (31, 33), (33, 31), (100, 200), (65, 320))
SEGMENTS: tuple[Any, ...] = (None, 37, "table")


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: what was compared.
        values: how many values.
        against: what with.
        passed: whether all were as they should be.
        detail: what was found.
    """

    name: str
    values: int
    against: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"{self.name}: {self.values} values, {self.against}: {self.detail}: {verdict}"

    def as_dict(self) -> dict[str, Any]:
        """The members of the JSON object."""
        return asdict(self)


def works(
    values: int, paths: tuple[str, ...], device: torch.device, seed: int
) -> Iterator[Callable[[], Case]]:
    """Every comparison, to be run.

    Args:
        values: of the corpus, one of `vectors.COUNTS`.
        paths: ways of rounding, of PATHS.
        device: where kernels run.
        seed: of random numbers.
    """
    known = vectors.committed()["values"][str(values)]
    for name, dtype, form, scaling in vectors.cases():
        for path in paths:
            yield partial(
                against_torchao,
                f"quantize {name} ({path})",
                partial(corpus, values, dtype, device),
                form,
                scaling,
                PATHS[path],
                known[name],
            )
    for form, path in product(FORMATS.values(), paths):
        yield partial(all_codes, form, path, device)
    for path in paths:
        yield partial(ragged, path, device, seed)
    for form, scaling in product(FORMATS.values(), SCALINGS):
        yield partial(bounded, form, scaling, device, seed)
    yield partial(swiglu, device, seed)
    for layout, transposed in product(LAYOUTS, (False, True)):
        yield partial(gemm, layout, transposed, device, seed)
        yield partial(exact_gemm, layout, transposed, device, seed)


def against_torchao(
    name: str,
    source: Callable[[], torch.Tensor],
    form: Format,
    scaling: str,
    target: int,
    wanted: dict[str, str],
) -> Case:
    """Both copies of the corpus have the bits that torchao gave them."""
    x = source()
    row, column = quantize(x, "both", scaling, dtype=form.dtype, target=target)
    found = vectors.digests((row.data, row.scales), (column.data, column.scales))
    wrong = [part for part in vectors.PARTS if found[part] != wanted[part]]
    detail = "equal bits"
    if wrong:
        detail = f"differs in {', '.join(wrong)}{_first_difference(x, row, column, form, scaling)}"
    return Case(name, 2 * x.numel(), "torchao", not wrong, detail)


def _first_difference(
    x: torch.Tensor, row: MXTensor, column: MXTensor, form: Format, scaling: str
) -> str:
    """Where the FP64 reference, which has torchao's bits, differs first."""
    for axis, copy, source in (("row", row, x), ("col", column.t(), x.t())):
        data, scales = reference.quantize_rows(source, form, scaling, (source.shape[1],))
        for part, ours, theirs in (("scale", copy.scales, scales), ("element", copy.data, data)):
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
            places = (ours != theirs).nonzero()
            if len(places):
                i, j = places[0].tolist()
                return (
                    f"; {len(places)} {part}s, first {axis}-wise at [{i}, {j}]: got "
                    f"{int(ours[i, j]):#04x}, wanted {int(theirs[i, j]):#04x}"
                )
    return "; the FP64 reference agrees with the kernel"


def all_codes(form: Format, path: str, device: torch.device) -> Case:
    """Every element with every scale code, both ways, back to BF16 and FP32."""
    element = torch.arange(256, dtype=torch.uint8, device=device).expand(256, 256).contiguous()
    code = torch.arange(256, dtype=torch.uint8, device=device)[:, None].expand(256, 8)
    upright = MXTensor(
        element.view(form.dtype),
        code.contiguous().view(SCALE_DTYPE),
        "row",
        (256, 256),
        (256,),
    )
    turned = MXTensor(
        element.t().contiguous().view(form.dtype),
        code.t().contiguous().view(SCALE_DTYPE),
        "col",
        (256, 256),
        (256,),
    )
    exact = reference.dequantize_rows(upright.data, upright.scales)
    back = partial(dequantize, target=PATHS[path])
    wrong = 0
    for dtype in (torch.bfloat16, torch.float32):
        # By way of FP32, which holds every product in its range exactly.
        wanted = exact.float().to(dtype)
        for got in (back(upright, dtype), back(turned, dtype).t()):
            wrong += int((~_same(got, wanted)).sum())
    codes = form.exact_bf16_codes
    inside = back(upright, torch.bfloat16)[codes.start : codes.stop].double()
    inexact = int((~_same(inside, exact[codes.start : codes.stop])).sum())
    detail = f"{wrong} wrong, {inexact} rounded by BF16 with codes {codes.start} to {codes[-1]}"
    return Case(f"dequantize {form.name} ({path})", 4 * 65536, "FP64", not wrong + inexact, detail)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    signs = torch.signbit(a) == torch.signbit(b)
    return ((a == b) & signs) | (a.isnan() & b.isnan())


def _random(shape: tuple[int, ...], device: torch.device, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(torch.bfloat16).to(device)


def ragged(path: str, device: torch.device, seed: int) -> Case:
    """Sizes that are no multiples of 32, in one segment and in several, against the reference."""
    wrong, values = [], 0
    for rows, cols in RAGGED:
        x = _random((rows, cols), device, seed + rows)
        for chosen in SEGMENTS:
            # An empty segment, one of a row, and the rest.
            segments = (0, 1, rows - 1) if chosen == "table" else chosen
            for transposed in (False, True):
                row, column = quantize(
                    x, "both", segments=segments, transposed=transposed, target=PATHS[path]
                )
                for copy, source in ((row, x), (column.t(), x.t())):
                    data, scales = reference.quantize_rows(source, E4M3, "rceil", copy.segments)
                    wanted = MXTensor(data, scales, "row", copy.shape, copy.segments)
                    values += x.numel()
                    if not copy.equal(wanted):
                        wrong.append(f"[{rows}, {cols}] in {segments}")
    detail = f"differs for {', '.join(wrong[:3])}" if wrong else "equal bits"
    return Case(f"ragged ({path})", values, "FP64", not wrong, detail)


def bounded(form: Format, scaling: str, device: torch.device, seed: int) -> Case:
    """No dequantised value is further off than the bound, and some come near it."""
    x = _random((256, 256), device, seed)
    x = x * torch.exp2(_random((256, 1), device, seed + 1) * 8).to(x.dtype)
    bound = reference.error_bound(x, form, scaling)
    values = quantize(x, "row", scaling, dtype=form.dtype).dequantize(torch.float64)
    share = float(((values - x.double()).abs() / bound.clamp(min=1e-300)).max())
    relative = float((values - x.double()).norm() / x.double().norm())
    detail = f"at most {share:.3f} of the bound, {relative:.2e} in the norm"
    return Case(
        f"error {form.name} {scaling}", x.numel(), "the bound in FP64", 0.9 < share <= 1.0, detail
    )


def swiglu(device: torch.device, seed: int) -> Case:
    """SwiGLU and both copies in one kernel: close to FP64, and the rounding is the format's."""
    gate_up = _random((96, 640), device, seed)
    gate, up = gate_up.double().chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    # The value that is quantised is off by a few roundings of FP32, which may pass a threshold.
    slack = exact.abs() * 1e-6
    worst = 0.0
    for copy, source in zip(swiglu_quantize(gate_up), (exact, exact.t()), strict=True):
        upright = copy if copy.axis == "row" else copy.t()
        bound = 2 * reference.error_bound(source.float(), E4M3, "rceil")
        error = (upright.dequantize(torch.float64) - source).abs()
        worst = max(worst, float((error / (bound + slack.max())).max()))
    detail = f"at most {worst:.3f} of twice the bound"
    return Case("swiglu", 2 * exact.numel(), "FP64", worst <= 1.0, detail)


def _operands(
    layout: str, transposed: bool, a: torch.Tensor, b: torch.Tensor, cut: int
) -> tuple[MXTensor, MXTensor, torch.Tensor, torch.Tensor]:
    """A [m, k] and b [n, k] quantised as `layout` takes them, and both dequantised, float64."""
    kind = LAYOUTS[layout]
    parts = (cut, 0, a.shape[1] - cut) if layout == "nt" else None
    made = []
    for x, axis in ((a, kind.a_axis), (b, kind.b_axis)):
        stored = x if axis == "row" else x.t().contiguous()
        made.append(quantize(stored, axis, segments=parts, transposed=transposed))
    left, right = ((t if t.axis == "row" else t.t()).dequantize(torch.float64) for t in made)
    return made[0], made[1], left, right


def gemm(layout: str, transposed: bool, device: torch.device, seed: int) -> Case:
    """Products in FP32 against FP64 of the dequantised operands; both ways of multiplying."""
    m, n, k = 160, 136, 200
    x, w = _random((m, k), device, seed), _random((n, k), device, seed + 1)
    a, b, left, right = _operands(layout, transposed, x, w, 77)
    exact, size = left @ right.t(), left.abs() @ right.abs().t()
    worst = 0.0
    for scaled in (False, True):
        out = mx_gemm(a, b, layout, out_dtype=torch.float32, block_scaled=scaled)
        worst = max(worst, float(((out.double() - exact).abs() / size.clamp(min=1e-300)).max()))
    detail = f"off by at most {worst:.1e} of the sum of magnitudes"
    name = f"gemm {layout}{' transposed' if transposed else ''}"
    return Case(name, 2 * m * n, "FP64", worst <= GEMM_LIMIT, detail)


def exact_gemm(layout: str, transposed: bool, device: torch.device, seed: int) -> Case:
    """Small integers, whose sums FP32 holds: the product must be that of FP64, to the bit."""
    m, n, k = 160, 136, 200
    x, w = ((_random((rows, k), device, seed + rows) * 4).round().clamp(-15, 15) for rows in (m, n))
    a, b, left, right = _operands(layout, transposed, x, w, 77)
    exact = left @ right.t()
    wrong = int((left != x).sum() + (right != w).sum())
    for scaled in (False, True):
        out = mx_gemm(a, b, layout, out_dtype=torch.float32, block_scaled=scaled)
        wrong += int((out.double() != exact).sum())
    name = f"gemm {layout}{' transposed' if transposed else ''}, integers"
    return Case(name, 2 * m * n, "FP64", wrong == 0, f"{wrong} wrong")

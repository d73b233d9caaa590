"""`bench`: GB/s of the casts beside the device's copy bandwidth, measured in the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from kosmos_core.errors import KosmosError
from kosmos_core.testing.bench import EventTimer, Timer, Timing, environment, time_rounds
from kosmos_core.worlds import World, gpu_world

from kosmos_mx import reference
from kosmos_mx.formats import E4M3, SCALINGS
from kosmos_mx.ops.quantize import quantize, swiglu_quantize
from kosmos_mx.tensor import MXTensor

ROUNDS = 3
COPY = "copy"
# The figure that has a target.
BOTH = "quantize both"
WANTED_SHARE = 0.70
# Columns, warps, steps and width of `--sweep`.
TILES = (
    (256, 4, 1, 16), (256, 4, 1, 8), (256, 8, 1, 8), (128, 4, 1, 8), (128, 2, 1, 8), (64, 2, 1, 8),
    (64, 1, 1, 8), (32, 1, 1, 8), (256, 4, 4, 8), (128, 4, 4, 8), (64, 1, 4, 8), (64, 1, 16, 8),
)  # fmt: skip


@click.command()
@click.option("--rows", default=16384, show_default=True, help="Rows of the matrix.")
@click.option("--cols", default=8192, show_default=True, help="Columns of the matrix.")
@click.option(
    "--scale-rounding", type=click.Choice(tuple(SCALINGS)), default="rceil", show_default=True
)
@click.option("--rounds", default=ROUNDS, show_default=True, help="Rounds of all variants.")
@click.option("--sweep", is_flag=True, help="Other tiles of the first cast, too.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path))
def bench(
    rows: int, cols: int, scale_rounding: str, rounds: int, sweep: bool, json_path: Path | None
) -> int:
    """Time casts of a BF16 matrix on this GPU, and a copy of it.

    Bytes are what a cast must move: the source once, every copy once. Exit status: 0; 1 if an
    output was wrong; 2 for bad arguments.
    """
    for name, value in (("rows", rows), ("cols", cols), ("rounds", rounds)):
        if value < 1:
            raise click.UsageError(f"{name}: got {value}, wanted 1 or more")
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise click.UsageError(f"{json_path}: its folder does not exist; create it first")
    if not torch.cuda.is_available():
        raise click.UsageError("bench: no GPU is visible; it measures GPUs (check runs anywhere)")
    with gpu_world(1) as world:

        def host(rank: int) -> dict[str, Any]:
            return run(world, EventTimer(world), rows, cols, scale_rounding, rounds, sweep)

        try:
            (report,) = world.spmd(host)
        except WrongOutput as error:
            click.echo(f"bench: {error}", err=True)
            return 1
    click.echo(table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        click.echo(f"wrote {json_path}")
    return 0


class WrongOutput(KosmosError):
    """A timed variant gave wrong bits; it has no time."""


def run(
    world: World,
    timer: Timer,
    rows: int,
    cols: int,
    scale_rounding: str,
    rounds: int,
    sweep: bool = False,
) -> dict[str, Any]:
    """Checks and times every variant.

    Args:
        world: one rank.
        timer: measures.
        rows: of the matrix.
        cols: of the matrix.
        scale_rounding: of the casts.
        rounds: rounds of all variants.
        sweep: time other tiles, too.

    Returns:
        What the JSON file holds.

    Raises:
        WrongOutput: a cast differs from the reference on sampled rows.
    """
    generator = torch.Generator(world.device).manual_seed(0)
    x = torch.randn(rows, cols, device=world.device, generator=generator).bfloat16()
    gate_up = torch.randn(rows, 2 * cols, device=world.device, generator=generator).bfloat16()
    out = torch.empty_like(x)
    row, column = quantize(x, "both", scale_rounding)
    _compare(x, row, column, scale_rounding)
    for name, values in zip(
        ("row", "column"), quantize(x, "both", scale_rounding, values="both"), strict=True
    ):
        if not torch.equal(values, (row if name == "row" else column).dequantize()):
            raise WrongOutput(f"values of the {name}-wise copy differ from the dequantised copy")
    variants: dict[str, tuple[int, Callable[[], object]]] = {
        COPY: (2 * _bytes(x), lambda: out.copy_(x)),
        BOTH: (
            _bytes(x) + row.num_bytes + column.num_bytes,
            lambda: quantize(x, "both", scale_rounding),
        ),
        "quantize both, transposed": (
            _bytes(x) + row.num_bytes + column.num_bytes,
            lambda: quantize(x, "both", scale_rounding, transposed=True),
        ),
        "quantize row": (_bytes(x) + row.num_bytes, lambda: quantize(x, "row", scale_rounding)),
        "quantize col": (_bytes(x) + column.num_bytes, lambda: quantize(x, "col", scale_rounding)),
        "swiglu and quantize both": (
            _bytes(gate_up) + row.num_bytes + column.num_bytes,
            lambda: swiglu_quantize(gate_up, "both", scale_rounding),
        ),
        "values of both": (
            3 * _bytes(x),
            lambda: quantize(x, "both", scale_rounding, values="both"),
        ),
        "dequantize row": (_bytes(x) + row.num_bytes, row.dequantize),
        "dequantize col": (_bytes(x) + column.num_bytes, column.dequantize),
    }
    for tile in TILES if sweep else ():
        for axis in ("both", "row", "col"):
            variants[f"quantize {axis}, {'/'.join(map(str, tile))}"] = (
                variants[f"quantize {axis}"][0],
                partial(quantize, x, axis, scale_rounding, tile=tile),
            )
    calls = {name: call for name, (_, call) in variants.items()}
    times = time_rounds(calls, timer, rounds=rounds)
    row, column = quantize(x, "both", scale_rounding)
    _compare(x, row, column, scale_rounding)
    return {
        **environment(world),
        "op": "quantize",
        "rows": rows,
        "cols": cols,
        "scale_rounding": scale_rounding,
        "wanted_share_of_copy": {BOTH: WANTED_SHARE},
        "rows_of_table": _figures({name: moved for name, (moved, _) in variants.items()}, times),
    }


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _compare(x: torch.Tensor, row: MXTensor, column: MXTensor, scaling: str) -> None:
    """Whole groups at the top and at the bottom of the matrix, bit by bit."""
    for begin in {0, (x.shape[0] - 1) // 32 * 32}:
        part = x[begin : begin + 32].cpu()
        turned = part.t().contiguous()
        data, scales = reference.quantize_rows(part, E4M3, scaling, (part.shape[1],))
        wide, wide_scales = reference.quantize_rows(turned, E4M3, scaling, (part.shape[0],))
        group = begin // 32
        pairs = (
            ("row-wise elements", row.data[begin : begin + 32], data),
            ("row-wise scales", row.scales[begin : begin + 32], scales),
            ("column-wise elements", column.data[begin : begin + 32], wide.t()),
            ("column-wise scales", column.scales[group : group + 1], wide_scales.t()),
        )
        for name, ours, wanted in pairs:
            if not torch.equal(ours.cpu().view(torch.uint8), wanted.view(torch.uint8)):
                raise WrongOutput(f"{name} of rows {begin} on differ from the reference")


def _figures(moved: dict[str, int], times: dict[str, Timing]) -> list[dict[str, Any]]:
    rates = {name: moved[name] / timing.median_ms / 1e6 for name, timing in times.items()}
    return [
        {
            "name": name,
            "bytes": moved[name],
            **timing.to_dict(),
            "gb_per_s": rates[name],
            "share_of_copy": rates[name] / rates[COPY],
        }
        for name, timing in times.items()
    ]


def table(report: dict[str, Any]) -> str:
    """The report as lines of text."""
    lines = [f"{'':32}{'ms':>9}{'GB/s':>9}{'of copy':>9}{'spread':>9}"]
    for row in report["rows_of_table"]:
        lines.append(
            f"{row['name']:32}{row['median_ms']:9.4f}{row['gb_per_s']:9.0f}"
            f"{row['share_of_copy']:9.1%}{row['spread']:9.1%}"
        )
    return "\n".join(lines)

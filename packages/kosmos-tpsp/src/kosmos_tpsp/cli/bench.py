"""``python -m kosmos_tpsp bench ag_gemm``: fused calls against everything they compete with."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed as dist
from kosmos_core.errors import KosmosError

from kosmos_tpsp.bench.cases import Case, order_cases, parse_cases
from kosmos_tpsp.bench.figure import draw
from kosmos_tpsp.bench.report import console, print_report
from kosmos_tpsp.bench.results import Report
from kosmos_tpsp.bench.runner import Settings
from kosmos_tpsp.bench.session import group_rig, process_group, run
from kosmos_tpsp.bench.unfused import UNFUSED
from kosmos_tpsp.ops.catalog import DRIVERS, LAYOUTS, ORDERS, choose
from kosmos_tpsp.ops.mx import INSTALL, has_mx
from kosmos_tpsp.ops.prepared import POLICIES, TRANSPORTS

QUICK = Settings(rounds=1, warmup=3, calls=8)
DEFAULT_SHAPES = "llama3"
OUTPUT = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.argument("op", metavar="OP", type=click.Choice(tuple(UNFUSED)))
@click.option(
    "--shapes",
    help="llama3, names of its shapes (8B-FC1-MBS1) or m,n,k; semicolons between.  "
    "[default: llama3, none with --order-ablation]",
)
@click.option("--layout", type=click.Choice(LAYOUTS), help="[default: the op's]")
@click.option(
    "--dtype",
    type=click.Choice(("bf16", "mxfp8")),
    default="bf16",
    show_default=True,
    help="mxfp8: against NCCL on its bytes, dequantising and cuBLAS, and against fused bf16.",
)
@click.option("--policy", default="one_way", show_default=True, type=click.Choice(tuple(POLICIES)))
@click.option("--order", type=click.Choice(ORDERS), help="[default: the op's]")
@click.option("--transport", type=click.Choice(tuple(TRANSPORTS)), help="[default: by the rules]")
@click.option("--sweep", is_flag=True, help="Also two-way switching and fixed splits.")
@click.option("--order-ablation", is_flag=True, help="All queue orders of the op.")
@click.option("--rounds", type=click.IntRange(1), help="[default: 3]")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--quick", is_flag=True, help="One short round: for a look, not for a record.")
@click.option("--json", "json_path", type=OUTPUT, help="Write everything measured.")
@click.option("--png", "png_path", type=OUTPUT, help="Draw it.")
def bench(
    op: str,
    shapes: str | None,
    layout: str | None,
    dtype: str,
    policy: str,
    order: str | None,
    transport: str | None,
    sweep: bool,
    order_ablation: bool,
    rounds: int | None,
    seed: int,
    quick: bool,
    json_path: Path | None,
    png_path: Path | None,
) -> int:
    """Time OP on the GPUs of this group.

    Start it with torchrun --nproc-per-node N -m kosmos_tpsp -- bench ag_gemm. NCCL runs without
    NVLink multicast unless the environment sets NCCL_NVLS_ENABLE.

    Exit status: 0; 1 if an output was wrong or a rank gave up; 2 for bad arguments.
    """
    driver = DRIVERS[op]
    order = order or next(iter(driver.orders), None)
    layout = layout or driver.layouts[0]
    if order is not None and order not in driver.orders:
        wanted = ", ".join(driver.orders) or "none: there is no choice"
        raise click.UsageError(f"order: got {order} for {op}, wanted {wanted}")
    if order_ablation and not driver.orders:
        raise click.UsageError(f"order-ablation: {op} has no queue orders to choose from")
    if dtype not in driver.dtypes:
        raise click.UsageError(f"dtype: got {dtype} for {op}, wanted {driver.dtypes[0]}")
    if dtype == "mxfp8" and not has_mx():
        raise click.UsageError(f"dtype: got mxfp8, which needs kosmos-mx; {INSTALL}")
    cases, ordered = (
        [replace(case, dtype=dtype) for case in some]
        for some in _cases(op, shapes, layout, order_ablation)
    )
    _check_outputs(json_path, png_path)
    if not torch.cuda.is_available():
        raise click.UsageError("bench: no GPU is visible; it measures GPUs (check runs anywhere)")
    settings = replace(QUICK if quick else Settings(), seed=seed)
    if rounds is not None:
        settings = replace(settings, rounds=rounds)
    choices = choose(
        op, {"policy": policy, "order": order, "transport": transport, "layout": layout}
    )
    described = {
        "op": op, "dtype": dtype, "command": _command(), "policy": policy, "order": order,
        "transport": transport, "quick": quick,
    }  # fmt: skip
    try:
        with process_group(), group_rig([*cases, *ordered], choices) as rig:
            report = run(
                rig, cases, ordered, settings, sweep=sweep, described=described,
                so_far=partial(write, json_path),
            )  # fmt: skip
            first = dist.get_rank() == 0
    except KosmosError as error:
        click.echo(f"bench: {error}", err=True)
        return 1
    if first:
        publish(report, json_path, png_path)
    return 1 if report.wrong else 0


def publish(report: Report, json_path: Path | None, png_path: Path | None) -> None:
    """Prints the report and writes its files; the picture only when every output was right."""
    screen = console()
    print_report(report, screen)
    if json_path is not None:
        write(json_path, report)
        screen.print(f"wrote {json_path}", markup=False, soft_wrap=True)
    if png_path is not None and not report.wrong:
        draw(report, png_path)
        screen.print(f"wrote {png_path}", markup=False, soft_wrap=True)


def write(json_path: Path | None, report: Report) -> None:
    """Writes what has been measured, also before the end: a run may be stopped."""
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")


def _cases(
    op: str, shapes: str | None, layout: str, ablation: bool
) -> tuple[list[Case], list[Case]]:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if shapes is None and not ablation:
        shapes = DEFAULT_SHAPES
    try:
        return (
            [] if shapes is None else parse_cases(shapes, layout, ranks, op),
            order_cases(op) if ablation else [],
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _check_outputs(*paths: Path | None) -> None:
    """Refuses, before minutes are spent, what could not be written after them."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"{path}: its folder does not exist; create it first")


def _command() -> str:
    """The command line, without this machine's folders."""
    arguments = []
    given = sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]
    for argument in given:
        option, equals, value = argument.rpartition("=")
        name = Path(value).name if os.path.isabs(value) else value
        arguments.append(option + equals + name)
    ranks = os.environ.get("WORLD_SIZE")
    start = ["python"] if ranks is None else ["torchrun", "--nproc-per-node", ranks]
    # The -- keeps torchrun, up to Python 3.12, from taking --m for an option of its own.
    apart = [] if ranks is None else ["--"]
    return shlex.join([*start, "-m", "kosmos_tpsp", *apart, *arguments])

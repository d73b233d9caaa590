"""Rounding error of `gemm_rs` beside that of a ring that keeps BF16 sums, both against FP64.

`python -m kosmos_tpsp.bench.rs_error` runs the kernel on virtual ranks of the CPU executor. Both
arms reduce the same partial sums: those that the kernel has left in the staging regions.

Source: paper, Table A.6.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from kosmos_core.device.layout import STAGING
from kosmos_core.worlds import World, cpu_world

from kosmos_tpsp.ops.gemm_rs import GemmRsOptions, gemm_rs
from kosmos_tpsp.workspaces import TpSpWorkspace

# (n, k of a rank) of the shapes of Table A.6. Rows and columns are alike, so that few of them,
# 32,768 elements of the output, stand for all; the contraction is whole.
SHAPES = {"8B-OProj-MBS8": (128, 512), "70B-Down-MBS8": (128, 3584)}
ROWS = 256


@dataclass(frozen=True)
class RsError:
    """Errors of one shape, ||out - ref|| / ||ref|| in the Frobenius norm.

    Attributes:
        shape: its name.
        m: rows over all ranks.
        n: columns.
        k: contraction of a rank.
        ranks: number of ranks.
        reduction: of the kernel, against the FP64 sum of the partial sums.
        ring_reduction: of the ring, against the same.
        end_to_end: of the kernel, against the FP64 product.
        ring_end_to_end: of the ring, against the same.
        repeatable: whether another schedule gave the same bits.
    """

    shape: str
    m: int
    n: int
    k: int
    ranks: int
    reduction: float
    ring_reduction: float
    end_to_end: float
    ring_end_to_end: float
    repeatable: bool

    @property
    def ratios(self) -> tuple[float, float]:
        """How many times larger the ring's errors are: of the reduction, end to end."""
        return self.ring_reduction / self.reduction, self.ring_end_to_end / self.end_to_end


def ring_sum(partials: torch.Tensor) -> torch.Tensor:
    """What a ring reduce-scatter leaves that sends BF16 and so rounds at every hop.

    Args:
        partials: [ranks, ranks, rows, n] bf16, the partial sums by the rank that has them and the
            rank that owns the rows.

    Returns:
        [ranks, rows, n] bf16, by owner. The chunk of a rank sets out from the next rank and comes
        past all others before its owner.
    """
    ranks = partials.shape[0]
    owned = []
    for owner in range(ranks):
        total = partials[(owner + 1) % ranks, owner]
        for hop in range(2, ranks + 1):
            total = (total.float() + partials[(owner + hop) % ranks, owner].float()).bfloat16()
        owned.append(total)
    return torch.stack(owned)


def relative(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||."""
    return float((out.double() - reference).norm() / reference.norm())


def operands(rank: int, seed: int, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's x [m, k] and w [n, k]."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(m, k, generator=source).bfloat16()
    return x, (torch.randn(n, k, generator=source) / k**0.5).bfloat16()


def measure(shape: str, m: int, n: int, k: int, ranks: int, seed: int = 0, wgs: int = 4) -> RsError:
    """Runs a shape on the executor and compares it with the ring and with FP64."""

    def host(rank: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
        workspace = TpSpWorkspace(world, m, n, reduce_transports=("pull",))
        x, w = operands(rank, seed, m, n, k)
        out = gemm_rs(x, w, workspace, options=GemmRsOptions(transport="pull"))
        workspace.synchronize()
        # The first call fills the first half, with rows by owner.
        staged = workspace.buffer(int(STAGING.value))[: m * n].clone()
        workspace.destroy()
        return out, staged.view(world.size, m // world.size, n)

    def run(schedule: int) -> tuple[torch.Tensor, torch.Tensor]:
        with cpu_world(ranks, wgs=wgs, seed=schedule, start="random") as world:
            outs, staged = zip(*world.spmd(host, world), strict=True)
        return torch.stack(outs), torch.stack(staged)

    out, partials = run(0)
    again, _ = run(1)
    product = torch.zeros(m, n, dtype=torch.float64)
    for rank in range(ranks):
        x, w = operands(rank, seed, m, n, k)
        product += x.double() @ w.double().t()
    exact, ring = partials.double().sum(0), ring_sum(partials)
    product = product.view(out.shape)
    return RsError(
        shape, m, n, k, ranks,
        relative(out, exact), relative(ring, exact), relative(out, product),
        relative(ring, product), torch.equal(out.view(torch.int16), again.view(torch.int16)),
    )  # fmt: skip


@click.command()
@click.option("--ranks", type=click.IntRange(2, 8), default=8, show_default=True)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write a summary."
)
def main(ranks: int, json_file: Path | None) -> None:
    """Errors of gemm_rs and of a BF16 ring on the shapes of the paper's Table A.6."""
    rows = []
    for shape, (n, k) in SHAPES.items():
        found = measure(shape, ROWS, n, k, ranks)
        reduction, end_to_end = found.ratios
        click.echo(
            f"{shape}: reduction {found.reduction:.2e} against {found.ring_reduction:.2e} of a "
            f"ring ({reduction:.2f}x), end to end {found.end_to_end:.2e} against "
            f"{found.ring_end_to_end:.2e} ({end_to_end:.2f}x)"
        )
        ratios = {"reduction_ratio": reduction, "end_to_end_ratio": end_to_end}
        rows.append({**asdict(found), **ratios})
    if json_file is not None:
        summary = {
            "benchmark": "rs_error",
            # Without this machine's folders.
            "command": " ".join(
                ["python -m kosmos_tpsp.bench.rs_error"]
                + [a.rpartition("/")[2] for a in sys.argv[1:]]
            ),
            "rows": rows,
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        }
        json_file.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""``python -m kosmos_heuristics plan OP``: print a plan, and of TP operations a predicted time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from kosmos_heuristics.ag_gemm import plan_ag_gemm, plan_ag_gemm_pair
from kosmos_heuristics.bulk_plans import plan_bulk_ag, plan_bulk_rs
from kosmos_heuristics.estimate import can_fuse, estimate
from kosmos_heuristics.explain import Reason
from kosmos_heuristics.gemm_rs import plan_gemm_rs
from kosmos_heuristics.load import load_machine
from kosmos_heuristics.machine import TRANSPORTS
from kosmos_heuristics.moe import plan_moe_backward, plan_moe_forward
from kosmos_heuristics.moe_plans import MoePlan
from kosmos_heuristics.moe_problem import MoeProblem
from kosmos_heuristics.plan_base import PlanBase
from kosmos_heuristics.problems import (
    DTYPES,
    AgGemmPairProblem,
    AgGemmProblem,
    BulkAgProblem,
    BulkRsProblem,
    GemmRsProblem,
    TpProblem,
)

TP_SIZES = {"tp": "world_size", "m": "m", "n": "n", "k": "k"}
MOE_SIZES = {
    "ep": "world_size",
    "tokens": "tokens",
    "hidden": "hidden",
    "inter": "inter",
    "experts": "experts",
    "topk": "topk",
}


class Op(NamedTuple):
    """An operation of the command line.

    Attributes:
        problem: Makes its problem.
        planner: Makes its plan of problem and machine.
        sizes: Required options, and the arguments of the problem that they are.
        problem_options: Further options that are arguments of the problem.
        plan_options: Options that are arguments of the planner.
    """

    problem: Callable[..., Any]
    planner: Callable[..., Any]
    sizes: Mapping[str, str]
    problem_options: tuple[str, ...]
    plan_options: tuple[str, ...]


_MOE_OPTIONS = ("cap", "transport", "policy", "order")
OPS = {
    "ag_gemm": Op(
        AgGemmProblem,
        plan_ag_gemm,
        TP_SIZES,
        ("dtype", "layout", "keep_gathered"),
        ("cap", "transport", "policy", "order", "movers_per_peer", "split_k"),
    ),
    "ag_gemm_pair": Op(
        AgGemmPairProblem,
        plan_ag_gemm_pair,
        TP_SIZES,
        ("dtype",),
        ("cap", "transport", "policy", "order", "movers_per_peer"),
    ),
    "gemm_rs": Op(
        GemmRsProblem,
        plan_gemm_rs,
        TP_SIZES,
        ("dtype",),
        ("cap", "transport", "policy", "order", "reducers_per_peer", "split_k"),
    ),
    "bulk_ag": Op(
        BulkAgProblem,
        plan_bulk_ag,
        TP_SIZES,
        ("dtype",),
        ("cap", "transport", "policy", "movers_per_peer", "split_k"),
    ),
    "bulk_rs": Op(
        BulkRsProblem,
        plan_bulk_rs,
        TP_SIZES,
        ("dtype",),
        ("cap", "transport", "policy", "reducers_per_peer", "split_k"),
    ),
    "moe_forward": Op(MoeProblem, plan_moe_forward, MOE_SIZES, ("dtype",), _MOE_OPTIONS),
    "moe_backward": Op(MoeProblem, plan_moe_backward, MOE_SIZES, ("dtype",), _MOE_OPTIONS),
}
BY_RULES = "[default: by the rules]"


@click.command()
@click.argument("op", metavar="OP", type=click.Choice(tuple(OPS)))
@click.option("--machine", required=True, help="h200, mi350x, mi355x, executor or a JSON file.")
@click.option("--tp", type=int, help="Ranks of the tensor-parallel group.")
@click.option("--m", type=int, help="Rows of the GEMM's output (tokens; bulk_rs: local width).")
@click.option("--n", type=int, help="Columns of the GEMM's output.")
@click.option("--k", type=int, help="Contraction (bulk_rs: tokens).")
@click.option("--ep", type=int, help="MoE: ranks of the expert-parallel group.")
@click.option("--tokens", type=int, help="MoE: tokens of one rank.")
@click.option("--hidden", type=int, help="MoE: hidden size.")
@click.option("--inter", type=int, help="MoE: width of an expert.")
@click.option("--experts", type=int, help="MoE: experts over all ranks.")
@click.option("--topk", type=int, help="MoE: experts that a token chooses.")
@click.option("--layout", help="ag_gemm: tn or nn.  [default: tn]")
@click.option("--dtype", help=" or ".join(DTYPES) + ".  [default: bf16, ag_gemm_pair: mxfp8]")
@click.option("--cap", type=int, help="Most WGs in the grid.  [default: all resident]")
@click.option("--transport", type=click.Choice(TRANSPORTS), help=BY_RULES)
@click.option(
    "--policy", help="one_way, two_way, fixed, serial; MoE has more.  [default: the op's]"
)
@click.option("--order", help="Order of the tile queue or of the push lists.  [default: the op's]")
@click.option("--movers-per-peer", type=int, help=BY_RULES)
@click.option("--reducers-per-peer", type=int, help=BY_RULES)
@click.option("--split-k", type=int, help=BY_RULES)
@click.option(
    "--keep-gathered/--drop-gathered",
    default=None,
    help="ag_gemm: whether the gathered operand is an output.  [default: kept for nn in bf16]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object and nothing else.")
@click.option("--explain", is_flag=True, help="Rule and source of every field.")
def plan(op: str, machine: str, as_json: bool, explain: bool, **options: Any) -> None:
    """Print the plan of OP, its predicted time (TP), and whether it would be fused.

    OP is ag_gemm, ag_gemm_pair (MXFP8), gemm_rs, bulk_ag or bulk_rs, with --tp --m --n --k; or
    moe_forward or moe_backward, with --ep --tokens --hidden --inter --experts --topk.
    """
    chosen_op = OPS[op]
    given = {name: value for name, value in options.items() if value is not None}
    _check_options(op, chosen_op, given)
    sizes = {argument: given[name] for name, argument in chosen_op.sizes.items()}
    problem = chosen_op.problem(**sizes, **_pick(given, chosen_op.problem_options))
    described = load_machine(machine)
    chosen = chosen_op.planner(problem, described, **_pick(given, chosen_op.plan_options))
    data: dict[str, object] = {"op": op, "machine": described.name, "problem": _sizes(problem)}
    data.update(chosen.to_dict())
    lines = [str(chosen)]
    if not isinstance(chosen, MoePlan):
        predicted = estimate(problem, described, chosen)
        declined = can_fuse(problem, described, chosen)
        data["estimate"] = asdict(predicted)
        data["decline"] = declined.reason if declined else None
        lines.append(
            f"{described.name}: {predicted.time_ms:.3f} ms predicted, "
            f"{predicted.baseline_ms:.3f} ms unfused, efficiency {predicted.efficiency:.2f}"
        )
        lines.append(f"declined: {declined}" if declined else "fused")
    if as_json:
        if explain:
            data["explain"] = {
                reason.field: {"rule": reason.rule, "source": reason.source}
                for reason in chosen.reasons
            }
        click.echo(json.dumps(data))
        return
    click.echo("\n".join(lines))
    if explain:
        _print_reasons(chosen, chosen.reasons)


def _pick(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _check_options(op: str, known: Op, given: Mapping[str, Any]) -> None:
    """Name the first option that is missing or that the operation does not have."""
    wanted = " ".join(f"--{name}" for name in known.sizes)
    for name in known.sizes:
        if name not in given:
            raise click.UsageError(f"--{name}: missing; {op} needs {wanted}")
    for name in given:
        if name not in (*known.sizes, *known.problem_options, *known.plan_options):
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option}: {op} has no such option; leave it out")


def _sizes(problem: TpProblem | MoeProblem) -> dict[str, object]:
    sizes: dict[str, object] = asdict(problem)
    if isinstance(problem, AgGemmProblem):
        sizes["keep_gathered"] = problem.keeps_gathered
    return sizes


def _print_reasons(plan: PlanBase, reasons: tuple[Reason, ...]) -> None:
    """A line a field, and below them every source once."""
    table = Table("field", "value", "rule", "source")
    values = plan.to_dict()
    sources: dict[str, int] = {}
    for reason in reasons:
        number = sources.setdefault(reason.source, len(sources) + 1)
        # Rules and sources are text: brackets in them are not markup.
        table.add_row(reason.field, str(values[reason.field]), reason.rule, str(number))
    console = Console(markup=False, highlight=False)
    console.print(table)
    for source, number in sources.items():
        console.print(f"source {number}: {source}")

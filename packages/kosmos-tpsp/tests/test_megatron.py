"""Megatron-core's layers, fused: beside its own where it is installed, and on a stand-in."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError
from kosmos_core.worlds import World
from kosmos_tpsp import (
    LinearCall,
    TpSpWorkspace,
    column_parallel_linear,
    megatron,
    reference,
)
from kosmos_tpsp.cli.layer_check import distance
from kosmos_tpsp.megatron import parallel_linears
from torch import nn

PROGRAM = Path(__file__).parent / "megatron_group.py"
HIDDEN, INNER, TOKENS = 32, 48, 16


class StandIn(nn.Module):
    """What `megatron_core` layers have that ours use."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, tp_group: Any,
        skip_bias_add: bool = False, is_expert: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.tp_group = config, tp_group
        self.skip_bias_add, self.is_expert = skip_bias_add, is_expert
        shape = (output_size, input_size)
        self.weight = nn.Parameter(torch.randn(shape).bfloat16())
        self.bias = nn.Parameter(torch.randn(output_size).bfloat16())


class StandInColumn(StandIn):
    def __init__(self, input_size: int, output_size: int, **settings: Any) -> None:
        super().__init__(input_size, output_size // settings["tp_group"].size, **settings)

    def _forward_impl(self, input: Any, weight: Any, **rest: Any) -> Any:
        return input @ weight.t() + rest["bias"]

    def forward(self, input_: torch.Tensor) -> Any:
        bias = None if self.skip_bias_add else self.bias
        out = self._forward_impl(
            input=input_, weight=self.weight, bias=bias, sequence_parallel=True,
            allreduce_dgrad=False,
        )  # fmt: skip
        return out, self.bias if self.skip_bias_add else None


class StandInRow(StandIn):
    def __init__(self, input_size: int, output_size: int, **settings: Any) -> None:
        super().__init__(input_size // settings["tp_group"].size, output_size, **settings)

    def forward(self, input_: torch.Tensor) -> Any:
        return input_ @ self.weight.t() + self.bias, None


class RowWithoutGroup(StandInRow):
    def __init__(self, input_size: int, output_size: int) -> None:
        raise AssertionError("not called")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in the place of Megatron-core's."""
    layers = ModuleType(megatron._LAYERS)
    layers.ColumnParallelLinear = StandInColumn  # type: ignore[attr-defined]
    # Its signature is that of the real one where it matters.
    layers.RowParallelLinear = type(  # type: ignore[attr-defined]
        "RowParallelLinear", (StandInRow,), {"__init__": _row_init}
    )
    monkeypatch.setitem(sys.modules, megatron._LAYERS, layers)
    return layers


def _row_init(
    self: Any, input_size: int, output_size: int, *, tp_group: Any = None, **settings: Any
) -> None:
    StandInRow.__init__(self, input_size, output_size, tp_group=tp_group, **settings)


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"sequence_parallel": True, "params_dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_both_layers_run_fused(
    skip_bias_add: bool, stand_in: ModuleType, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        column_class, row_class = parallel_linears(TOKENS, cap=2)
        assert issubclass(column_class, stand_in.ColumnParallelLinear)
        settings = {"config": config(), "tp_group": world, "skip_bias_add": skip_bias_add}
        column, row = column_class(HIDDEN, INNER, **settings), row_class(INNER, HIDDEN, **settings)
        assert column.kosmos_call.workspace is row.kosmos_call.workspace
        assert column.kosmos_call.options.cap == 2
        x = torch.randn(TOKENS // 4, 2, HIDDEN).bfloat16().requires_grad_()
        hidden, bias = column(x)
        flat = x.detach().reshape(-1, HIDDEN)
        wanted, _ = reference.ag_gemm(flat, column.weight.detach(), world)
        if skip_bias_add:
            assert bias is column.bias
        else:
            assert bias is None
            wanted += column.bias.detach()
        torch.testing.assert_close(hidden.detach().view(TOKENS, -1), wanted, rtol=2e-2, atol=0.1)
        y, bias = row(hidden)
        assert (bias is row.bias) == skip_bias_add
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None
        assert column.weight.grad.any()
        assert isinstance(column.kosmos_call.workspace.get(), TpSpWorkspace)

    on_cpu(2, host)


def test_one_rank_is_left_to_megatron(
    stand_in: ModuleType, on_cpu: Callable[..., list[Any]]
) -> None:
    def host(rank: int, world: World) -> None:
        settings = {"config": config(sequence_parallel=False), "tp_group": world}
        column, row = (kind(HIDDEN, HIDDEN, **settings) for kind in parallel_linears(TOKENS))
        assert column.kosmos_call is row.kosmos_call is None
        x = torch.randn(TOKENS, HIDDEN).bfloat16()
        assert torch.equal(column(x)[0], x @ column.weight.t() + column.bias)
        assert torch.equal(row(x)[0], x @ row.weight.t() + row.bias)

    on_cpu(1, host)


@pytest.mark.parametrize("size", [1, 2])
def test_mxfp8_takes_the_operators_of_its_own(
    size: int, stand_in: ModuleType, on_cpu: Callable[..., list[Any]]
) -> None:
    """With one rank, too, which in BF16 is Megatron-core's."""
    pytest.importorskip("kosmos_mx")

    def host(rank: int, world: World) -> None:
        settings = {"config": config(sequence_parallel=size > 1), "tp_group": world}
        column, row = (
            kind(HIDDEN, HIDDEN, **settings) for kind in parallel_linears(TOKENS, precision="mxfp8")
        )
        x = torch.randn(TOKENS // size, 1, HIDDEN).bfloat16().requires_grad_()
        y, _ = row(column(x)[0])
        assert y.grad_fn is not None
        y.sum().backward()
        for layer in (column, row):
            exact = LinearCall(layer.kosmos_call.workspace)
            assert layer.kosmos_call.mx is not None
            assert exact.mx is None
        plain = column_parallel_linear(x, column.weight, None, exact)
        quantised = column_parallel_linear(x, column.weight, None, column.kosmos_call)
        off = distance(quantised, plain)
        assert 1e-2 < off < 5e-2

    on_cpu(size, host)


@pytest.mark.parametrize(
    ("changes", "settings", "told"),
    [
        ({"sequence_parallel": False}, {}, "config.sequence_parallel: got False, wanted True"),
        ({"params_dtype": torch.float32}, {}, "config.params_dtype: got torch.float32, wanted"),
        ({"defer_embedding_wgrad_compute": True}, {}, "defer_embedding_wgrad_compute: got True"),
        ({}, {"is_expert": True}, "is_expert: got an expert's layer"),
    ],
)
def test_what_cannot_be_fused_is_refused(
    changes: dict[str, Any],
    settings: dict[str, Any],
    told: str,
    stand_in: ModuleType,
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> None:
        column, _ = parallel_linears(TOKENS)
        with pytest.raises(ArgumentError, match=told):
            column(HIDDEN, HIDDEN, config=config(**changes), tp_group=world, **settings)

    on_cpu(2, host)


def test_a_missing_or_old_megatron_is_named(
    stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.RowParallelLinear = RowWithoutGroup  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"take no tp_group; install megatron-core 0\.13"):
        parallel_linears(TOKENS)

    monkeypatch.setitem(sys.modules, megatron._LAYERS, None)
    with pytest.raises(ImportError, match="install megatron-core"):
        parallel_linears(TOKENS)


def run_beside(backend: str) -> dict[str, Any]:
    """Differences from Megatron-core's own layers on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    visible = {"CUDA_VISIBLE_DEVICES": ""} if backend == "gloo" else {}
    run = subprocess.run(
        [*command, "--standalone", str(PROGRAM), backend],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **visible},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu(2))])
def test_results_are_those_of_megatron_core(backend: str) -> None:
    found = run_beside(backend)
    assert found["state"]
    assert found["marked"]
    assert len(found["apart"]) == 6
    assert {name: e for name, e in found["apart"].items() if not e <= 5e-3} == {}

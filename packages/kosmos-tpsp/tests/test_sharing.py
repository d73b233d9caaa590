"""The workspace that layers share; arguments of layers and calls that are refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError, KosmosError, PeerFaultError, WorkspaceError
from kosmos_core.worlds import World, cpu_world, reference_world
from kosmos_tpsp import (
    ColumnParallelLinear,
    LinearCall,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    TpSpWorkspace,
    column_parallel_linear,
    destroy_workspaces,
    row_parallel_linear,
)
from kosmos_tpsp.sharing import SharedWorkspace, shared_workspace, world_of

TOKENS = 16


def test_layers_share_one_workspace_of_the_largest_size(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        layers = [
            ColumnParallelLinear(features, 32, group=world, max_tokens=tokens)
            for features, tokens in ((32, TOKENS), (64, 8), (16, 2 * TOKENS))
        ]
        (shared,) = {layer.call.workspace for layer in layers}
        assert isinstance(shared, SharedWorkspace)
        layers[0](torch.zeros(TOKENS // 2, 32).bfloat16())
        made = shared.get()
        assert (made.max_tokens, made.max_features) == (2 * TOKENS, 64)
        # What fits joins it; what does not, later layers share anew.
        assert shared_workspace(world, TOKENS, 64) is shared
        larger = shared_workspace(world, TOKENS, 65)
        assert larger is not shared
        assert shared_workspace(world, TOKENS, 128) is larger
        assert layers[1](torch.zeros(4, 64).bfloat16()).shape == (8, 16)
        destroy_workspaces(world)
        assert made.destroyed
        with pytest.raises(WorkspaceError, match="destroyed"):
            layers[0](torch.zeros(TOKENS // 2, 32).bfloat16())
        again = ColumnParallelLinear(32, 32, group=world, max_tokens=TOKENS)
        assert again(torch.zeros(TOKENS // 2, 32).bfloat16()).shape == (TOKENS, 16)

    on_cpu(2, host)


def test_what_is_destroyed_before_its_first_use_is_not_made_any_more(
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(32, 32, group=world, max_tokens=TOKENS)
        destroy_workspaces(world)
        with pytest.raises(WorkspaceError, match="destroyed; construct the layers anew"):
            layer(torch.zeros(TOKENS // 2, 32).bfloat16())

    on_cpu(2, host)


def test_layers_revive_what_they_share(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(32, 32, group=world, max_tokens=TOKENS)
        x = torch.zeros(TOKENS // 2, 32)

        def call() -> None:
            layer(x.to(torch.float32 if rank else torch.bfloat16))
            layer.call.workspace.get().synchronize()

        with pytest.raises(KosmosError):
            call()
        world.barrier()
        layer.call.workspace.reset()
        assert layer(x.bfloat16()).shape == (TOKENS, 16)
        destroy_workspaces(world)

    on_cpu(2, host)


def test_a_copied_layer_has_weights_of_its_own_and_the_same_workspace(
    on_cpu: Callable[..., list[Any]],
) -> None:
    # As averages of a model's weights are kept.
    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(32, 32, group=world, max_tokens=TOKENS)
        x = torch.randn(TOKENS // 2, 32).bfloat16()
        with torch.no_grad():
            wanted = layer(x)
            twin = copy.deepcopy(layer)
            layer.weight.zero_()
            assert torch.equal(twin(x), wanted)
        assert twin.call.workspace is layer.call.workspace
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(layer.call.workspace)
        destroy_workspaces(world)

    on_cpu(2, host)


def test_what_cannot_be_sharded_is_not_prepared(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        layer = ColumnParallelLinear(32, 32, group=world, max_tokens=TOKENS)
        for tokens in (TOKENS - 1, -2, 2.0):
            with pytest.raises(ArgumentError, match=rf"tokens: got {tokens}, wanted a multiple"):
                layer.prepare(tokens)
        with torch.inference_mode():
            layer.prepare(TOKENS)
        assert layer.weight.grad is None
        destroy_workspaces(world)

    on_cpu(2, host)


def test_a_workspace_of_its_own(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        with TpSpWorkspace(world, TOKENS, 32) as workspace:
            layer = RowParallelLinear(64, 32, workspace=workspace, cap=2)
            assert layer.call.workspace is workspace
            layer(torch.zeros(TOKENS, 32).bfloat16())
            with pytest.raises(WorkspaceError, match="rows of 32 features, wanted 64"):
                ColumnParallelLinear(64, 32, workspace=workspace)
            with pytest.raises(WorkspaceError, match="together with max_tokens or group"):
                ColumnParallelLinear(32, 32, workspace=workspace, max_tokens=8)

    on_cpu(2, host)


def test_the_world_of_a_group_is_made_once() -> None:
    world = reference_world()
    assert world_of(world) is world
    assert world_of(None) is world_of(None)


def test_nothing_is_made_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    world = reference_world()
    monkeypatch.setattr(world, "is_capturing", lambda: True)
    layer = ColumnParallelLinear(8, 8, group=world, max_tokens=4)
    with pytest.raises(
        WorkspaceError, match=r"during graph capture; call the layer or its prepare"
    ):
        layer(torch.zeros(4, 8).bfloat16())


CONSTRUCTED: list[tuple[Any, tuple[int, ...], dict[str, Any], str]] = [
    (ColumnParallelLinear, (8, 9), {}, "out_features: got 9, wanted a multiple of the 2 ranks"),
    (RowParallelLinear, (9, 8), {}, "in_features: got 9, wanted a multiple of the 2 ranks"),
    (RowParallelLinear, (8, 0), {}, "out_features: got 0, wanted a positive integer"),
    (RowParallelLinear, (8, 8), {"splits": (4, 4)}, "splits: got .* row-parallel layer"),
    (ColumnParallelLinear, (8, 8), {"splits": (4, 5)}, "splits: got 5, wanted a multiple"),
    (ColumnParallelLinear, (8, 8), {"splits": (4, 2)}, "add up to out_features 8"),
    (ColumnParallelLinear, (8, 8), {"splits": (8, -8)}, "splits: got -8, wanted a positive"),
    (ColumnParallelLinear, (8, 8), {"dtype": torch.float32}, "dtype: got torch.float32, wanted"),
    (ColumnParallelLinear, (8, 8), {"max_tokens": None}, "max_tokens: got none, wanted the most"),
    (ColumnParallelLinear, (8, 8), {"max_tokens": 0}, "max_tokens: got 0, wanted a positive"),
    (ColumnParallelLinear, (8, 8), {"cap": 1}, "cap: got 1, wanted at least 2 workgroups"),
    (ColumnParallelLinear, (8, 8), {"main_grad": 1}, "main_grad: got 1, wanted True or False"),
    (ParallelMLP, (8, 7), {}, "splits: got 7, wanted a multiple of the 2 ranks"),
    (ParallelAttention, (8, 3), {}, "num_heads: got 3, wanted a multiple of the 2 ranks"),
    (ParallelAttention, (8, 4), {"num_kv_heads": 1}, "num_kv_heads: got 1, wanted a multiple"),
    (ParallelAttention, (8, 4), {"num_kv_heads": 6}, "num_kv_heads: got 6, wanted a divisor"),
]


@pytest.mark.parametrize(("kind", "sizes", "arguments", "told"), CONSTRUCTED)
def test_bad_arguments_of_a_layer(
    kind: Any,
    sizes: tuple[int, ...],
    arguments: dict[str, Any],
    told: str,
    on_cpu: Callable[..., list[Any]],
) -> None:
    def host(rank: int, world: World) -> None:
        with pytest.raises((ArgumentError, WorkspaceError), match=told):
            kind(*sizes, group=world, **{"max_tokens": TOKENS, **arguments})

    on_cpu(2, host)


def attempt(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except KosmosError as error:
        return type(error).__name__, str(error)
    return "", ""


BAD_INPUTS = {
    "another width": (torch.zeros(8, 24).bfloat16(), "column", "wanted a contraction"),
    "another dtype": (torch.zeros(8, 32), "column", "x: got dtype torch.float32"),
    "one dimension": (torch.zeros(32).bfloat16(), "column", "wanted a matrix"),
    "too many tokens": (torch.zeros(16, 32).bfloat16(), "column", "larger max_tokens"),
    "ragged tokens": (torch.zeros(15, 32).bfloat16(), "row", "x: got 15 rows, wanted a multiple"),
    "ragged sequence": (torch.zeros(3, 4, 32).bfloat16(), "row", "x: got 3 in dimension 0, wanted"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_of_one_rank_are_told_to_the_other(name: str) -> None:
    x, layout, told = BAD_INPUTS[name]

    def host(rank: int) -> None:
        workspace = TpSpWorkspace(world, TOKENS, 32)
        call = LinearCall(workspace)
        w = torch.zeros(32, 32).bfloat16()
        forward = column_parallel_linear if layout == "column" else row_parallel_linear
        good = torch.zeros(8, 32).bfloat16()
        found, text = attempt(lambda: forward(x if rank == 1 else good, w, None, call))
        if rank == 1:
            assert found in ("ArgumentError", "WorkspaceError")
            assert told in text
        workspace.world.barrier()
        if rank == 0:
            with pytest.raises(PeerFaultError, match="rank 1 refused its call before launch"):
                forward(good, w, None, call)
        workspace.world.barrier()
        workspace.reset()
        assert attempt(lambda: forward(good, w, None, call)) == ("", "")

    with cpu_world(2) as world:
        world.spmd(host)


def test_a_main_grad_that_does_not_fit_is_refused(on_cpu: Callable[..., list[Any]]) -> None:
    def host(rank: int, world: World) -> None:
        layer = RowParallelLinear(32, 32, group=world, max_tokens=TOKENS)
        layer.weight.main_grad = torch.zeros(16, 32)
        with pytest.raises(ArgumentError, match=r"weight.main_grad: got \(16, 32\) on cpu"):
            layer(torch.zeros(TOKENS, 16).bfloat16()).sum().backward()

    on_cpu(2, host)

"""Bad input on one of four ranks: a clear exception on each, nobody waits, a reset revives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kosmos_core.errors import (
    ArgumentError,
    KosmosError,
    PeerError,
    PeerFaultError,
    PeerMismatchError,
    PeerTimeoutError,
    WorkspaceError,
)
from kosmos_core.worlds import World
from kosmos_tpsp.ops import validate
from kosmos_tpsp.ops.ag_gemm import AgGemmOptions, ag_gemm
from kosmos_tpsp.workspaces import TpSpWorkspace

SIZE, ROWS, N, K = 4, 24, 24, 16
VICTIM = 2

Call = Callable[[TpSpWorkspace], Any]
OnCpu = Callable[..., list[Any]]


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def good(rank: int, workspace: TpSpWorkspace) -> torch.Tensor:
    """A call that fits, whose result is checked."""
    x, w = matrix(ROWS, K, seed=rank), matrix(N, K, seed=100 + rank)
    out = ag_gemm(x, w, workspace)
    assert isinstance(out, torch.Tensor)
    gathered = torch.cat([matrix(ROWS, K, seed=r) for r in range(workspace.world.size)])
    wanted = gathered.double() @ w.double().t()
    workspace.synchronize()
    assert (out.double() - wanted).norm() <= 4e-3 * wanted.norm()
    return out


def error_of(call: Callable[[], Any]) -> KosmosError:
    """What a call raises; it must raise one of our errors."""
    with pytest.raises(KosmosError) as caught:
        call()
    return caught.value


def host(rank: int, world: World, bad: Call, timeout_s: float) -> KosmosError:
    """A good call, the victim's bad one among good ones, a refusal, a reset, a good one."""
    workspace = TpSpWorkspace(world, SIZE * ROWS, K, timeout_s=timeout_s)
    good(rank, workspace)
    world.barrier()

    def call() -> None:
        if rank == VICTIM:
            bad(workspace)
        else:
            good(rank, workspace)
        workspace.synchronize()

    error = error_of(call)
    world.barrier()
    later = error_of(lambda: good(rank, workspace))
    assert isinstance(later, PeerError)
    workspace.reset()
    good(rank, workspace)
    workspace.destroy()
    return error


def of_shape(rows: int, n: int, k: int, **options: Any) -> Call:
    """A call of a shape, in itself a right one."""
    w = (n, k) if options.get("layout", "tn") == "tn" else (k, n)
    return lambda workspace: ag_gemm(matrix(rows, k), matrix(*w), workspace, **options)


def out_over(workspace: TpSpWorkspace, source: torch.Tensor, place: int) -> None:
    """A call whose x (place 0) or w (place 1) lies at the end of its out."""
    out = matrix(SIZE * ROWS, N)
    operands = [X, W]
    operands[place] = out.view(-1)[-source.numel() :].view(source.shape)
    ag_gemm(*operands, workspace, out=out)


class Holder(torch.Tensor):
    """A tensor that has no memory, as DTensors and tensors under torch.compile have none."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


X, W = matrix(ROWS, K), matrix(N, K)

REFUSED = {
    "dtype of x": (lambda ws: ag_gemm(X.float(), W, ws), "x: got dtype torch.float32", "dtype"),
    "dtype of w": (lambda ws: ag_gemm(X, W.half(), ws), "w: got dtype torch.float16", "dtype"),
    "device": (lambda ws: ag_gemm(X.to("meta"), W, ws), "x: got device meta, wanted cpu", "device"),
    "not a matrix": (lambda ws: ag_gemm(X[None], W, ws), r"x: got shape (1, 24, 16)", "shape"),
    "contraction": (lambda ws: ag_gemm(X, W[:, :8], ws), "wanted a contraction of 16", "shape"),
    "no features": (of_shape(ROWS, N, 0), "got k = 0", "size"),
    "no columns": (of_shape(ROWS, 0, K), "n = 0", "size"),
    "cap": (of_shape(ROWS, N, K, cap=1), "cap: got 1, wanted at least 2", "cap"),
    "negative cap": (of_shape(ROWS, N, K, cap=-3), "cap: got -3", "cap"),
    "policy": (of_shape(ROWS, N, K, policy="any"), "policy: got 'any'", "argument"),
    "order": (of_shape(ROWS, N, K, order="any"), "order: got 'any'", "argument"),
    "layout": (of_shape(ROWS, N, K, layout="nt"), "layout: got 'nt'", "argument"),
    "transport": (of_shape(ROWS, N, K, transport="fly"), "transport: got 'fly'", "argument"),
    "movers": (of_shape(ROWS, N, K, movers_per_peer=-1), "movers_per_peer", "argument"),
    "split": (of_shape(ROWS, N, K, split_k=0), "split_k: got 0", "argument"),
    # The compile guard knows no kernel of eight parts: reductions spill in it.
    "eight parts": (of_shape(ROWS, N, K, split_k=8), "split_k: got 8, wanted 1", "argument"),
    "out": (
        lambda ws: ag_gemm(X, W, ws, out=torch.empty(SIZE * ROWS, N)), "out: got", "shape",
    ),
    "x is none": (lambda ws: ag_gemm(None, W, ws), "x: got NoneType", "argument"),
    "x holds another": (lambda ws: ag_gemm(Holder(X), W, ws), "x: got Holder, whose", "argument"),
    "w is sparse": (lambda ws: ag_gemm(X, W.to_sparse(), ws), "w: got torch.sparse", "argument"),
    "w is a list": (lambda ws: ag_gemm(X, [1], ws), "w: got list", "argument"),
    "out is a list": (lambda ws: ag_gemm(X, W, ws, out=[1]), "out: got list", "argument"),
    "out over x": (lambda ws: out_over(ws, X, 0), "out: got memory that x or w", "argument"),
    "out over w": (lambda ws: out_over(ws, W, 1), "out: got memory that x or w", "argument"),
    "out with grad": (
        lambda ws: ag_gemm(X, W, ws, out=matrix(SIZE * ROWS, N).requires_grad_()),
        "out: got a tensor that requires grad", "argument",
    ),
    "unknown choice": (of_shape(ROWS, N, K, caps=8), "caps: got a choice", "argument"),
    "choice beside options": (
        of_shape(ROWS, N, K, cap=2, options=AgGemmOptions()), "cap: got together", "argument",
    ),
    "options of another kind": (of_shape(ROWS, N, K, options={}), "options: got dict", "argument"),
    "cap of another type": (of_shape(ROWS, N, K, cap="8"), "cap: got '8'", "argument"),
    "cap without a hash": (of_shape(ROWS, N, K, cap=[4]), "cap: got [4]", "argument"),
    "policy without a hash": (
        of_shape(ROWS, N, K, policy=["one_way"]), "policy: got ['one_way']", "argument",
    ),
    "no policy": (of_shape(ROWS, N, K, policy=None), "policy: got None", "argument"),
    "split of another type": (of_shape(ROWS, N, K, split_k=2.0), "split_k: got 2.0", "argument"),
    "traced into nothing": (of_shape(ROWS, N, K, traced=True), "traced: got True", "argument"),
    "flag": (of_shape(ROWS, N, K, force="no"), "force: got 'no'", "argument"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_raises_here_and_tells_the_peers_why(case: str, on_cpu: OnCpu) -> None:
    bad, told, reason = REFUSED[case]
    errors = on_cpu(SIZE, host, bad, 120.0, jump_clock=False)
    assert type(errors[VICTIM]) is ArgumentError
    assert told in str(errors[VICTIM])
    for rank, error in enumerate(errors):
        if rank != VICTIM:
            assert type(error) is PeerFaultError
            assert f"rank {VICTIM} refused its call before launch: bad {reason}" in str(error)
            assert (error.rank, error.raised_by) == (rank, VICTIM)


def test_whatever_goes_wrong_before_the_launch_is_told_to_the_peers(
    on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = matrix(ROWS, K)
    dense = validate.dense

    def without_memory(t: torch.Tensor) -> torch.Tensor:
        if t is failing:
            raise KosmosError("out of memory")
        return dense(t)

    monkeypatch.setattr(validate, "dense", without_memory)
    errors = on_cpu(SIZE, host, lambda ws: ag_gemm(failing, W, ws), 120.0, jump_clock=False)
    assert str(errors.pop(VICTIM)) == "out of memory"
    assert all(type(error) is PeerFaultError and error.peer == VICTIM for error in errors)


def test_a_call_that_cannot_be_launched_is_told_to_the_peers(on_cpu: OnCpu) -> None:
    def without_registers(workspace: TpSpWorkspace) -> None:
        world = workspace.world
        launch = world.launch

        def fail(kernel: Any, *args: Any, **settings: Any) -> None:
            if kernel.__name__ == "ag_gemm_kernel" and world.rank == VICTIM:
                world.launch = launch  # type: ignore[method-assign]
                raise KosmosError("out of registers")
            launch(kernel, *args, **settings)

        world.launch = fail  # type: ignore[method-assign]
        good(VICTIM, workspace)

    errors = on_cpu(SIZE, host, without_registers, 120.0, jump_clock=False)
    assert str(errors.pop(VICTIM)) == "out of registers"
    assert all(type(error) is PeerFaultError and error.peer == VICTIM for error in errors)
    assert all(f"rank {VICTIM} could not launch its call" in str(error) for error in errors)


def test_something_else_than_a_workspace_is_refused() -> None:
    with pytest.raises(ArgumentError, match="workspace: got NoneType"):
        ag_gemm(X, W, None)  # type: ignore[arg-type]


OTHER_CALLS = {
    "features": of_shape(ROWS, N, K - 8),
    "columns": of_shape(ROWS, N + 8, K),
    "rows": of_shape(ROWS - 8, N, K),
    "layout": of_shape(ROWS, N, K, layout="nn"),
    "transport": of_shape(ROWS, N, K, transport="pull"),
    "kept": of_shape(ROWS, N, K, keep_gathered=True),
    "serial": of_shape(ROWS, N, K, policy="serial"),
    "unaligned": of_shape(ROWS, N + 1, K),
}


@pytest.mark.parametrize("case", OTHER_CALLS)
def test_calls_that_differ_between_ranks_are_a_mismatch_that_names_the_odd_one(
    case: str, on_cpu: OnCpu
) -> None:
    errors = on_cpu(SIZE, host, OTHER_CALLS[case], 120.0, jump_clock=False)
    for rank, error in enumerate(errors):
        assert type(error) is PeerMismatchError
        assert error.rank == rank
        assert VICTIM in (error.peer, error.raised_by)
    odd = re.compile(rf"\[{VICTIM}\] differ|rank {VICTIM} ")
    assert all(odd.search(str(error)) for error in errors)


def test_no_rows_on_one_rank_alone_end_by_the_bound(on_cpu: OnCpu) -> None:
    # A call without rows launches nothing, so that only the bound tells the others.
    def absent(workspace: TpSpWorkspace) -> None:
        out = ag_gemm(matrix(0, K), W, workspace)
        assert isinstance(out, torch.Tensor)
        workspace.world.barrier()
        good(VICTIM, workspace)

    def bounded(rank: int, world: World) -> KosmosError:
        workspace = TpSpWorkspace(world, SIZE * ROWS, K, timeout_s=0.5)
        if rank == VICTIM:
            error = error_of(lambda: absent(workspace))
        else:
            error = error_of(lambda: good(rank, workspace))
            world.barrier()
        return error

    errors = on_cpu(SIZE, bounded)
    assert all(type(error) is PeerTimeoutError and error.peer == VICTIM for error in errors)


def test_no_rows_on_one_rank_alone_pair_no_later_call_with_another(on_cpu: OnCpu) -> None:
    # Nobody meets between the calls: without the count of calls that launch nothing, each call of
    # rank 0 would meet the one before it of its peers, and give wrong rows in silence.
    def equal_calls(rank: int, world: World) -> tuple[KosmosError, str]:
        workspace = TpSpWorkspace(world, 3 * ROWS, K)

        def calls() -> None:
            for step in range(3):
                rows = 0 if rank == 0 and step == 0 else ROWS
                ag_gemm(matrix(rows, K, seed=step), matrix(N, K), workspace)
            workspace.synchronize()

        error = error_of(calls)
        world.barrier()
        workspace.reset()
        good(rank, workspace)
        return error, workspace.last_op

    for rank, (error, last_op) in enumerate(on_cpu(3, equal_calls, jump_clock=False)):
        assert type(error) is PeerMismatchError
        assert 0 in (error.rank, error.peer, error.raised_by)
        assert ("calls without rows before it: 1" in str(error)) == (rank == 0)
        assert last_op == f"ag_gemm tn m={3 * ROWS} n={N} k={K}"


def test_no_rows_on_every_rank_leave_later_calls_alone(on_cpu: OnCpu) -> None:
    def equal_calls(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, 2 * ROWS, K)
        for _ in range(2):
            ag_gemm(matrix(0, K), matrix(N, K), workspace)
            good(rank, workspace)

    on_cpu(2, equal_calls, jump_clock=False)


def test_a_workspace_that_is_too_small_is_refused(on_cpu: OnCpu) -> None:
    for bad in (of_shape(ROWS + 8, N, K), of_shape(ROWS, N, K + 8)):
        errors = on_cpu(SIZE, host, bad, 120.0, jump_clock=False)
        assert type(errors[VICTIM]) is WorkspaceError
        assert "needs more than its [96, 16]" in str(errors[VICTIM])
        peers = [error for rank, error in enumerate(errors) if rank != VICTIM]
        assert all(type(error) is PeerFaultError for error in peers)
        assert all("bad workspace" in str(error) for error in peers)


def test_a_workspace_without_the_transport_is_refused(on_cpu: OnCpu) -> None:
    def only_push(rank: int, world: World) -> KosmosError:
        workspace = TpSpWorkspace(world, SIZE * ROWS, K, transports=("push",))
        assert good(rank, workspace).shape == (2 * ROWS, N)
        world.barrier()
        call = of_shape(ROWS, N, K, transport="pull" if rank == 0 else "push")
        return error_of(lambda: (call(workspace), workspace.synchronize()))

    errors = on_cpu(2, only_push, jump_clock=False)
    assert "transport: got 'pull', wanted one of push" in str(errors[0])
    assert type(errors[1]) is PeerFaultError


def test_a_destroyed_workspace_is_refused_on_every_rank(on_cpu: OnCpu) -> None:
    def after_destroy(rank: int, world: World) -> KosmosError:
        workspace = TpSpWorkspace(world, SIZE * ROWS, K)
        good(rank, workspace)
        workspace.destroy()
        with pytest.raises(WorkspaceError, match="destroyed"):
            workspace.reset()
        return error_of(lambda: good(rank, workspace))

    for error in on_cpu(SIZE, after_destroy):
        assert type(error) is WorkspaceError
        assert "it is destroyed; create a new one on every rank" in str(error)


def test_a_workspace_of_another_rank_is_refused(on_cpu: OnCpu) -> None:
    def with_the_next(rank: int, world: World) -> None:
        workspace = TpSpWorkspace(world, SIZE * ROWS, K)
        spaces = world.all_gather_object(workspace)
        launches = world.executor.stats["launches"]  # type: ignore[attr-defined]
        error = error_of(lambda: good(rank, spaces[(rank + 1) % SIZE]))
        assert type(error) is WorkspaceError
        assert f"it belongs to rank {(rank + 1) % SIZE}, got rank {rank}" in str(error)
        world.barrier()
        # Nothing was launched on anybody's words: the calls that were meant go on.
        assert world.executor.stats["launches"] == launches  # type: ignore[attr-defined]
        world.barrier()
        good(rank, workspace)

    on_cpu(SIZE, with_the_next, jump_clock=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((0, 16), "max_tokens: got 0"),
        ((-8, 16), "max_tokens: got -8"),
        ((64, 0), "max_features: got 0"),
        ((64, -1), "max_features: got -1"),
    ],
)
def test_a_workspace_of_no_size_is_refused(
    arguments: tuple[int, int], told: str, on_cpu: OnCpu
) -> None:
    def create(rank: int, world: World) -> KosmosError:
        return error_of(lambda: TpSpWorkspace(world, *arguments))

    for error in on_cpu(2, create):
        assert type(error) is WorkspaceError
        assert told in str(error)


def test_unknown_or_no_transports_and_bounds_out_of_range_are_refused(on_cpu: OnCpu) -> None:
    def create(rank: int, world: World) -> list[str]:
        return [
            str(error_of(lambda choice=choice: TpSpWorkspace(world, 8, 8, **choice)))
            for choice in ({"transports": ()}, {"transports": ("fly",)}, {"timeout_s": 0.0})
        ]

    for none, unknown, bound in on_cpu(2, create):
        assert "transports: got ()" in none
        assert "transports: got ('fly',)" in unknown
        assert "timeout_s: got 0.0" in bound


def test_after_an_abort_the_first_error_stays_until_the_reset(on_cpu: OnCpu) -> None:
    def sticky(rank: int, world: World) -> list[KosmosError]:
        workspace = TpSpWorkspace(world, SIZE * ROWS, K)
        if rank == VICTIM:
            error_of(lambda: ag_gemm(X.float(), W, workspace))
        else:
            error_of(lambda: good(rank, workspace))
        world.barrier()
        found = [error_of(workspace.check), error_of(workspace.synchronize)]
        found.append(error_of(lambda: good(rank, workspace)))
        found.append(error_of(lambda: ag_gemm(matrix(0, K), W, workspace)))
        workspace.reset()
        workspace.check()
        good(rank, workspace)
        return found

    for errors in on_cpu(SIZE, sticky):
        assert len({str(error) for error in errors}) == 1
        assert type(errors[0]) is PeerFaultError

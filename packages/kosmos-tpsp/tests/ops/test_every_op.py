"""What holds of every operation alike: memory that it refuses, and a launch that fails."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kosmos_core.errors import ArgumentError, PeerFaultError
from kosmos_core.worlds import World, cpu_world
from kosmos_tpsp.ops.bulk_ag import TENSOR
from kosmos_tpsp.ops.catalog import DRIVERS, Driver
from kosmos_tpsp.workspaces import TpSpWorkspace

OnCpu = Callable[..., list[Any]]
HERE = Path(__file__).parent
TOKENS, N, OTHER = 24, 16, 8


def given_to(driver: Driver, size: int, options: Any) -> dict[str, torch.Tensor]:
    """Operands of a call of an op, by name."""
    shape = driver.shape_of(TOKENS, N, OTHER)
    shapes = driver.operand_shapes(shape, size, options)
    return {name: torch.ones(of).bfloat16() for name, of in shapes.items()}


@pytest.mark.parametrize("op", DRIVERS)
def test_an_output_in_the_memory_of_the_workspace_is_refused(op: str, on_cpu: OnCpu) -> None:
    driver = DRIVERS[op]
    options = driver.options(**({"dx_to": TENSOR} if op == "bulk_ag" else {}))

    def host(rank: int, world: World) -> int:
        workspace = TpSpWorkspace(world, TOKENS, N)
        given = given_to(driver, world.size, options)
        shapes = driver.output_shapes(driver.shape_of(TOKENS, N, OTHER), world.size, options)
        refused = 0
        for output, argument in driver.into(options).items():
            # Peers may still read what an earlier call has handed over.
            memory = workspace.handover(*shapes[output])
            with pytest.raises(ArgumentError, match=f"{argument}: got memory of the workspace"):
                driver.op(*given.values(), workspace, **{argument: memory}, options=options)
            workspace.reset()
            refused += 1
        made = driver.op(*given.values(), workspace, options=options)
        workspace.synchronize()
        return refused * bool(driver.named(made))

    assert on_cpu(2, host) == [len(driver.into(options))] * 2


def test_200_workspaces_in_use_do_not_fill_the_executor() -> None:
    cycle, ops = runpy.run_path(str(HERE / "cycles.py"))["cycle"], list(DRIVERS)

    def host(rank: int, world: World) -> int:
        memory = world.executor.memory  # type: ignore[attr-defined]
        held = []
        for i in range(200):
            cycle(rank, world, ops[i % len(ops)], 16, 16)
            world.barrier()
            held.append(len(memory.regions))
        return max(held)

    # Some 40 come and go in a cycle, and the executor forgets them in batches: one that stayed of
    # each rank in each cycle would make this 400 more.
    with cpu_world(2, wgs=2) as world:
        assert max(world.spmd(host, world)) < 400


@pytest.mark.parametrize("op", DRIVERS)
def test_the_peers_hear_of_a_call_that_cannot_be_launched(op: str, on_cpu: OnCpu) -> None:
    driver = DRIVERS[op]

    def host(rank: int, world: World, broken: list[bool]) -> None:
        workspace = TpSpWorkspace(world, TOKENS, N)
        given = given_to(driver, world.size, driver.options())
        launch = world.launch

        def refuses(kernel: Any, *rest: Any, **more: Any) -> None:
            if world.rank == 1 and broken and kernel.__name__ not in ("fault_kernel",):
                raise RuntimeError("out of shared memory")
            launch(kernel, *rest, **more)

        world.barrier()
        if rank == 0:
            world.launch = refuses  # type: ignore[method-assign]
        world.barrier()

        def call() -> None:
            driver.op(*given.values(), workspace, options=driver.options())
            workspace.synchronize()

        if rank == 1:
            with pytest.raises(RuntimeError, match="out of shared memory"):
                call()
        else:
            with pytest.raises(PeerFaultError, match="rank 1 could not launch its call"):
                call()
        world.barrier()
        broken.clear()
        workspace.reset()
        call()

    # A wait that nobody ends would be reported, not waited out.
    on_cpu(3, host, [True], jump_clock=False)

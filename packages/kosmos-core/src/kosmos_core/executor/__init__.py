"""Concurrent CPU executor for Triton kernels of several ranks.

    with Executor(4, policy=Random(seed), weak="random", race="raise", strict=True) as ex:
        flags = ex.symmetric(8, torch.int32, "flags")
        for rank in range(4):
            with ex.on(rank):
                kernel[(6,)](flags[rank], ...)
        ex.run()

See docs/executor.md.
"""

from .clocktime import CostModel
from .errors import (
    DataRace,
    Deadlock,
    ExecutorError,
    ExecutorStopped,
    KernelFault,
    MemoryFault,
    UnsupportedAsm,
    Wait,
)
from .executor import Executor
from .mutation import Mutation
from .policies import Policy, PriorityRandom, Random, Replay, RoundRobin, Starve, Timed
from .state import is_active
from .tasks import Task

__all__ = [
    "CostModel",
    "DataRace",
    "Deadlock",
    "Executor",
    "ExecutorError",
    "ExecutorStopped",
    "KernelFault",
    "MemoryFault",
    "Mutation",
    "Policy",
    "PriorityRandom",
    "Random",
    "Replay",
    "RoundRobin",
    "Starve",
    "Task",
    "Timed",
    "UnsupportedAsm",
    "Wait",
    "is_active",
]

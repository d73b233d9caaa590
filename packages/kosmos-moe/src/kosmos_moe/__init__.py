"""Mixture-of-experts layers for expert parallelism, in one kernel launch."""

from importlib.metadata import PackageNotFoundError, version

from kosmos_moe.functions import moe
from kosmos_moe.memory import MoeLimits
from kosmos_moe.modules import MoELayer
from kosmos_moe.ops.custom import moe_forward_op
from kosmos_moe.ops.moe_backward import MoeGradients, moe_backward
from kosmos_moe.ops.moe_forward import MoeOptions, MoeResult, MoeSaved, moe_forward, run_forward
from kosmos_moe.reference import Experts, MoeOutput, moe_layer
from kosmos_moe.router import RouterOptions
from kosmos_moe.workspaces import MoEWorkspace

__all__ = [
    "Experts",
    "MoELayer",
    "MoEWorkspace",
    "MoeGradients",
    "MoeLimits",
    "MoeOptions",
    "MoeOutput",
    "MoeResult",
    "MoeSaved",
    "RouterOptions",
    "__version__",
    "moe",
    "moe_backward",
    "moe_forward",
    "moe_forward_op",
    "moe_layer",
    "run_forward",
]

try:
    __version__ = version("kosmos-moe")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"

"""Mixture-of-experts layers for expert parallelism."""

from importlib.metadata import PackageNotFoundError, version

from kosmos_moe.reference import Experts, MoeOutput, moe_layer
from kosmos_moe.router import RouterOptions

__all__ = ["Experts", "MoeOutput", "RouterOptions", "__version__", "moe_layer"]

try:
    __version__ = version("kosmos-moe")
except PackageNotFoundError:  # run from a source tree that is on the path but not installed
    __version__ = "0+source"

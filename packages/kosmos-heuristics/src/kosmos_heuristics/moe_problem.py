"""The sizes of one MoE layer with expert parallelism, validated."""

from __future__ import annotations

from dataclasses import dataclass

from kosmos_heuristics.checks import check_choice
from kosmos_heuristics.errors import ProblemError
from kosmos_heuristics.problems import (
    DTYPES,
    MX_BLOCK,
    OUTPUT_BYTES,
    check_multiple,
    check_size,
    check_world_size,
    wire_bytes,
)

MAX_TOPK = 16
# GEMM work of a routed row, in units of hidden x inter: gate, up and down forward (2 FLOP each);
# twice that backward (dgrad and wgrad).
FORWARD_FLOPS = 6
BACKWARD_FLOPS = 12
GEMM1_FLOPS = 4


@dataclass(frozen=True)
class MoeProblem:
    """One MoE layer, forward or backward. Sizes are those of balanced routing.

    Args:
        tokens: Tokens of one rank; 0 is allowed.
        hidden: Hidden size H.
        inter: Width I of an expert.
        experts: Experts over all ranks, a multiple of ``world_size``.
        topk: Experts that a token chooses, 1 to 16.
        world_size: Ranks in the expert-parallel group, 1 to 8.
        dtype: ``bf16`` or ``mxfp8``.

    Raises:
        ProblemError: Naming the argument, what it got, what it wanted and the remedy.
    """

    tokens: int
    hidden: int
    inter: int
    experts: int
    topk: int
    world_size: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_size("tokens", self.tokens, 0, "pass the tokens of one rank")
        for name in ("hidden", "inter", "experts", "topk"):
            check_size(name, getattr(self, name), 1, "pass the layer's size")
        check_world_size("world_size", self.world_size)
        most = min(MAX_TOPK, self.experts)
        if self.topk > most:
            wanted = f"at most {most}: 16, and no more than there are experts"
            raise ProblemError("topk", self.topk, wanted, "choose fewer experts a token")
        ranks = f"world_size {self.world_size}"
        check_multiple("experts", self.experts, self.world_size, ranks, " experts")
        check_choice(ProblemError, "dtype", self.dtype, DTYPES, "cast the operands")
        if self.dtype == "mxfp8":
            block = f"the MXFP8 block of {MX_BLOCK}"
            check_multiple("hidden", self.hidden, MX_BLOCK, block)
            check_multiple("inter", self.inter, MX_BLOCK, block)

    @property
    def num_peers(self) -> int:
        """Remote ranks."""
        return self.world_size - 1

    @property
    def rows(self) -> int:
        """Rows that a rank sends, and on average receives: tokens x topk."""
        return self.tokens * self.topk

    @property
    def remote_row_elements(self) -> int:
        """Elements of the rows that leave a rank when all ranks get equally many."""
        return self.rows * self.hidden * self.num_peers // self.world_size

    @property
    def dispatch_bytes(self) -> int:
        """Bytes of token rows that leave a rank in the forward dispatch."""
        return wire_bytes(self.remote_row_elements, self.dtype)

    @property
    def combine_bytes(self) -> int:
        """Bytes that leave a rank in a combine, and those of dY: BF16 for any ``dtype``."""
        return self.remote_row_elements * OUTPUT_BYTES

    @property
    def gemm1_flops(self) -> int:
        """Work of the first GEMM of the forward, which the dispatch overlaps."""
        return GEMM1_FLOPS * self.rows * self.hidden * self.inter

    @property
    def forward_flops(self) -> int:
        """Work of the routed experts' GEMMs forward."""
        return FORWARD_FLOPS * self.rows * self.hidden * self.inter

    @property
    def backward_flops(self) -> int:
        """Work of the routed experts' GEMMs backward: two dgrads and two wgrads."""
        return BACKWARD_FLOPS * self.rows * self.hidden * self.inter

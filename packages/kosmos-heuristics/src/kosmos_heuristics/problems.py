"""Problems: the sizes of one fused operation, validated."""

from __future__ import annotations

from dataclasses import dataclass

from kosmos_heuristics.checks import check_choice, check_int
from kosmos_heuristics.errors import ProblemError

LAYOUTS = ("tn", "nn")
DTYPES = ("bf16",)
DTYPE_BYTES = {"bf16": 2}
MAX_WORLD_SIZE = 8


@dataclass(frozen=True)
class AgGemmProblem:
    """All-gather of a row-sharded operand fused with its GEMM: ``[m, k] x [k, n] -> [m, n]``.

    Layout names are BLAS column-major as in the paper: ``tn`` is the forward of a column-parallel
    layer, ``X [m, k] W [n, k]^T``; ``nn`` the data gradient of a row-parallel one,
    ``dY [m, k] W [k, n]``. Each rank holds ``m / world_size`` rows of the gathered operand.

    Args:
        m: Rows (tokens) of the gathered operand over all ranks; 0 is allowed.
        n: Columns of the local output.
        k: Contraction, the width of the gathered operand.
        world_size: Ranks in the group, 1 to 8.
        layout: ``tn`` or ``nn``.
        dtype: ``bf16``.
        keep_gathered: Whether the gathered operand is an output too. None means what the layout
            needs: kept for ``nn`` (the weight gradient reads it), dropped for ``tn``.

    Raises:
        ProblemError: Naming the argument, what it got, what it wanted and the remedy.
    """

    m: int
    n: int
    k: int
    world_size: int
    layout: str = "tn"
    dtype: str = "bf16"
    keep_gathered: bool | None = None

    def __post_init__(self) -> None:
        check_int(ProblemError, "m", self.m, 0, "pass the row count over all ranks")
        check_int(ProblemError, "n", self.n, 1, "pass the local output width")
        check_int(ProblemError, "k", self.k, 1, "pass the contraction size")
        check_int(ProblemError, "world_size", self.world_size, 1, "pass the size of the group")
        if self.world_size > MAX_WORLD_SIZE:
            raise ProblemError(
                "world_size", self.world_size, f"at most {MAX_WORLD_SIZE}", "use a smaller group"
            )
        check_choice(ProblemError, "layout", self.layout, LAYOUTS, "use a layout of ag_gemm")
        check_choice(ProblemError, "dtype", self.dtype, DTYPES, "cast the operands")
        if self.keep_gathered not in (None, True, False):
            raise ProblemError("keep_gathered", self.keep_gathered, "a bool or None", "pass a bool")
        if self.m % self.world_size:
            raise ProblemError(
                "m",
                self.m,
                f"a multiple of world_size {self.world_size}",
                f"pad to {self.m + self.world_size - self.m % self.world_size} rows",
            )

    @property
    def chunk_rows(self) -> int:
        """Rows of one rank's chunk, ``m / world_size``."""
        return self.m // self.world_size

    @property
    def num_peers(self) -> int:
        """Remote ranks."""
        return self.world_size - 1

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the gathered operand."""
        return DTYPE_BYTES[self.dtype]

    @property
    def keeps_gathered(self) -> bool:
        """``keep_gathered`` with None resolved by the layout."""
        return self.layout == "nn" if self.keep_gathered is None else self.keep_gathered

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's chunk of the gathered operand."""
        return self.chunk_rows * self.k * self.element_bytes

    @property
    def remote_bytes(self) -> int:
        """Bytes that cross the fabric into (and out of) each rank."""
        return self.num_peers * self.chunk_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's GEMM, ``2 m n k``."""
        return 2 * self.m * self.n * self.k

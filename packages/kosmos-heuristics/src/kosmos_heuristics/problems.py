"""Problems: the sizes of one fused operation with tensor parallelism, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kosmos_heuristics.checks import check_choice, check_int
from kosmos_heuristics.errors import ProblemError

LAYOUTS = ("tn", "nn")
DTYPES = ("bf16", "mxfp8")
# Of one element of an operand; MXFP8 scales come on top (``wire_bytes``).
DTYPE_BYTES = {"bf16": 2, "mxfp8": 1}
# Partial sums and outputs are BF16 whatever the operands are (paper section 3.2).
OUTPUT_BYTES = 2
# MXFP8: one E8M0 scale byte for so many consecutive elements along the contraction.
MX_BLOCK = 32
MAX_WORLD_SIZE = 8
# Above any layer or batch; a larger size is garbage, and products of three stay exact in 64 bits
# of the device's counters.
MAX_SIZE = 1 << 30


def wire_bytes(elements: int, dtype: str) -> int:
    """Bytes in which ``elements`` of an operand cross the fabric, scales included.

    Source: paper section 4.2 (MXFP8 moves 33/64 of the BF16 bytes).
    """
    scales = elements // MX_BLOCK if dtype == "mxfp8" else 0
    return elements * DTYPE_BYTES[dtype] + scales


def check_size(name: str, value: object, minimum: int, remedy: str) -> int:
    """Return ``value`` if it is an int from ``minimum`` to ``MAX_SIZE``."""
    size = check_int(ProblemError, name, value, minimum, remedy)
    if size > MAX_SIZE:
        raise ProblemError(name, value, f"at most {MAX_SIZE}", remedy)
    return size


def check_world_size(name: str, value: object) -> int:
    """Return ``value`` if it is a group size that is supported."""
    size = check_int(ProblemError, name, value, 1, "pass the size of the group")
    if size > MAX_WORLD_SIZE:
        raise ProblemError(name, value, f"at most {MAX_WORLD_SIZE}", "use a smaller group")
    return size


def check_multiple(name: str, value: int, multiple: int, why: str, of: str = "") -> None:
    """Raise unless ``value`` is a multiple of ``multiple``, proposing a padding."""
    if value % multiple:
        padded = value + multiple - value % multiple
        raise ProblemError(name, value, f"a multiple of {why}", f"pad to {padded}{of}")


def check_chunk_blocks(m: int, world_size: int) -> None:
    """Raise unless every rank's rows are whole blocks of a column-wise MXFP8 copy."""
    blocks = MX_BLOCK * world_size
    check_multiple("m", m, blocks, f"{MX_BLOCK} times world_size, {blocks}, in MXFP8", " rows")


@dataclass(frozen=True)
class TpProblem:
    """What the operations of tensor parallelism have in common: one GEMM and one collective.

    ``m``, ``n``, ``k`` are those of the rank's own GEMM, ``[m, k] x [k, n] -> [m, n]``; layout
    names are BLAS column-major as in the paper. The size that holds the tokens is divided among
    the ranks and may be 0.

    Args:
        m: Rows of the GEMM's output.
        n: Columns of the GEMM's output.
        k: Contraction.
        world_size: Ranks in the group, 1 to 8.
        layout: One of the operation's layouts.
        dtype: ``bf16`` or ``mxfp8``, of the GEMM's operands.

    Raises:
        ProblemError: Naming the argument, what it got, what it wanted and the remedy.
    """

    m: int
    n: int
    k: int
    world_size: int
    layout: str = "tn"
    dtype: str = "bf16"

    OP: ClassVar[str]
    OP_LAYOUTS: ClassVar[tuple[str, ...]]
    OP_DTYPES: ClassVar[tuple[str, ...]] = DTYPES
    # The size that is divided among the ranks.
    TOKENS: ClassVar[str] = "m"
    # Whether every rank's rows are tiled by themselves, or the output as a whole.
    CHUNKED: ClassVar[bool] = True

    def __post_init__(self) -> None:
        remedies = {
            "m": "pass the rows of the GEMM's output",
            "n": "pass the columns of the GEMM's output",
            "k": "pass the contraction size",
        }
        remedies[self.TOKENS] = "pass the row count over all ranks"
        for name, remedy in remedies.items():
            check_size(name, getattr(self, name), 0 if name == self.TOKENS else 1, remedy)
        check_world_size("world_size", self.world_size)
        check_choice(
            ProblemError, "layout", self.layout, self.OP_LAYOUTS, f"use a layout of {self.OP}"
        )
        check_choice(ProblemError, "dtype", self.dtype, self.OP_DTYPES, "cast the operands")
        ranks = f"world_size {self.world_size}"
        check_multiple(self.TOKENS, self.tokens, self.world_size, ranks, " rows")
        if self.dtype == "mxfp8":
            check_multiple("k", self.k, MX_BLOCK, f"the MXFP8 block of {MX_BLOCK}")

    @property
    def tokens(self) -> int:
        """Rows over all ranks: ``m``, for ``bulk_rs`` ``k``."""
        size: int = getattr(self, self.TOKENS)
        return size

    @property
    def chunk_rows(self) -> int:
        """Rows of one rank's chunk, ``tokens / world_size``."""
        return self.tokens // self.world_size

    @property
    def num_peers(self) -> int:
        """Remote ranks."""
        return self.world_size - 1

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the GEMM's operands, MXFP8 scales not counted."""
        return DTYPE_BYTES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's chunk of what the collective moves."""
        raise NotImplementedError

    @property
    def remote_bytes(self) -> int:
        """Bytes that cross the fabric into (and out of) each rank."""
        return self.num_peers * self.chunk_bytes

    @property
    def flops(self) -> int:
        """Floating-point operations of one rank's GEMM, ``2 m n k``."""
        return 2 * self.m * self.n * self.k

    @property
    def operand_bytes(self) -> int:
        """Bytes of the GEMM's operands and output, each counted once."""
        operands = wire_bytes(self.m * self.k, self.dtype) + wire_bytes(self.n * self.k, self.dtype)
        return operands + self.m * self.n * OUTPUT_BYTES


@dataclass(frozen=True)
class AgGemmProblem(TpProblem):
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
        dtype: ``bf16`` or ``mxfp8``.
        keep_gathered: Whether the gathered operand is an output too. None means what the layout
            needs: kept for BF16 ``nn`` (the weight gradient reads it), dropped otherwise (in MXFP8
            the weight gradient reads a column-wise copy).

    Raises:
        ProblemError: Naming the argument, what it got, what it wanted and the remedy.
    """

    keep_gathered: bool | None = None

    OP: ClassVar[str] = "ag_gemm"
    OP_LAYOUTS: ClassVar[tuple[str, ...]] = LAYOUTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_gathered not in (None, True, False):
            raise ProblemError("keep_gathered", self.keep_gathered, "a bool or None", "pass a bool")

    @property
    def keeps_gathered(self) -> bool:
        """``keep_gathered`` with None resolved by layout and dtype."""
        if self.keep_gathered is None:
            return self.layout == "nn" and self.dtype == "bf16"
        return self.keep_gathered

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's chunk of the gathered operand."""
        return wire_bytes(self.chunk_rows * self.k, self.dtype)


@dataclass(frozen=True)
class AgGemmPairProblem(AgGemmProblem):
    """The whole backward of a row-parallel layer in MXFP8: one gather of two copies, two GEMMs.

    ``dY [m, k] W [k, n] -> [m, n]`` (NN) reads the row-wise copy of dY, the weight gradient
    ``dY^T [k, m] X [m, n] -> [k, n]`` (NT) the column-wise one, whose blocks lie along the tokens.

    Args:
        m: Rows (tokens) over all ranks; 0 is allowed.
        n: Columns of both outputs, the local width.
        k: Width of the gathered dY, the hidden size.
        world_size: Ranks in the group, 1 to 8.
        layout: ``nn``, that of the first GEMM.
        dtype: ``mxfp8``. In BF16 there is one copy: ``ag_gemm`` keeps it for a plain GEMM.
        keep_gathered: None or False: nothing is left to read it.
    """

    layout: str = "nn"
    dtype: str = "mxfp8"

    OP: ClassVar[str] = "ag_gemm_pair"
    OP_LAYOUTS: ClassVar[tuple[str, ...]] = ("nn",)
    OP_DTYPES: ClassVar[tuple[str, ...]] = ("mxfp8",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk_blocks(self.m, self.world_size)
        if self.keep_gathered:
            raise ProblemError("keep_gathered", True, "None or False", "use ag_gemm")

    @property
    def chunk_bytes(self) -> int:
        """Bytes of both copies of one rank's chunk."""
        return 2 * wire_bytes(self.chunk_rows * self.k, self.dtype)

    @property
    def flops(self) -> int:
        """Floating-point operations of both GEMMs."""
        return 4 * self.m * self.n * self.k

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operands and outputs of both GEMMs."""
        outputs = (self.m + self.k) * self.n * OUTPUT_BYTES
        operands = 2 * self.m * self.k + (self.k + self.m) * self.n
        return outputs + wire_bytes(operands, self.dtype)

    @property
    def data_gradient(self) -> AgGemmProblem:
        """The first GEMM with its own gather."""
        return AgGemmProblem(self.m, self.n, self.k, self.world_size, "nn", self.dtype, False)


@dataclass(frozen=True)
class GemmRsProblem(TpProblem):
    """GEMM fused with the reduce-scatter of its output: the forward of a row-parallel layer.

    ``X [m, k] W [n, k]^T -> [m, n]``, of which each rank keeps the sum of its ``m / world_size``
    rows.

    Args:
        m: Rows (tokens) over all ranks; 0 is allowed.
        n: Columns of the output.
        k: Contraction, the local width.
        world_size: Ranks in the group, 1 to 8.
        layout: ``tn``.
        dtype: ``bf16`` or ``mxfp8``; partial sums cross the fabric in BF16 either way.
    """

    OP: ClassVar[str] = "gemm_rs"
    OP_LAYOUTS: ClassVar[tuple[str, ...]] = ("tn",)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the partial sums of one rank's chunk, from one source."""
        return self.chunk_rows * self.n * OUTPUT_BYTES


@dataclass(frozen=True)
class BulkAgProblem(TpProblem):
    """All-gather of ``X [m, n]`` beside the data gradient of a column-parallel layer.

    ``dY [m, k] W [k, n] -> [m, n]``; what is gathered is needed later, by the weight gradient.

    Args:
        m: Rows (tokens) over all ranks; 0 is allowed.
        n: Columns of the output and of the gathered operand, the hidden size.
        k: Contraction, the local width.
        world_size: Ranks in the group, 1 to 8.
        layout: ``nn``.
        dtype: ``bf16`` or ``mxfp8``. In MXFP8 the gathered copy is the column-wise one, whose
            blocks lie along the tokens: a chunk holds whole blocks.
    """

    layout: str = "nn"

    OP: ClassVar[str] = "bulk_ag"
    OP_LAYOUTS: ClassVar[tuple[str, ...]] = ("nn",)
    CHUNKED: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype == "mxfp8":
            check_chunk_blocks(self.m, self.world_size)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's chunk of the gathered operand."""
        return wire_bytes(self.chunk_rows * self.n, self.dtype)


@dataclass(frozen=True)
class BulkRsProblem(TpProblem):
    """Reduce-scatter of ``dX [k, n]`` beside the weight gradient of a column-parallel layer.

    ``dY [k, m]^T X [k, n] -> [m, n]``: here the tokens are ``k``.

    Args:
        m: Rows of the weight gradient, the local output width of the layer.
        n: Columns of the weight gradient and of dX, the hidden size.
        k: Contraction, the tokens over all ranks; 0 is allowed.
        world_size: Ranks in the group, 1 to 8.
        layout: ``nt``.
        dtype: ``bf16`` or ``mxfp8``; dX is reduced in BF16 either way.
    """

    layout: str = "nt"

    OP: ClassVar[str] = "bulk_rs"
    OP_LAYOUTS: ClassVar[tuple[str, ...]] = ("nt",)
    TOKENS: ClassVar[str] = "k"
    CHUNKED: ClassVar[bool] = False

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one rank's chunk of dX, from one source."""
        return self.chunk_rows * self.n * OUTPUT_BYTES

"""What torchao makes of the corpus: digests of its results, committed with how they were made.

Comparing digests needs no torchao, hence also works on a GPU machine without a network; equal
digests are equal bits of every element and scale.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Iterator
from importlib import resources
from itertools import product
from typing import Any

import torch
from kosmos_core.errors import ArgumentError

from kosmos_mx.cli.corpus import corpus
from kosmos_mx.formats import FORMATS, SCALINGS, Format

FILE = "torchao.json"
COUNTS = (1 << 20, 10 << 20)
SOURCES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PARTS = ("row elements", "row scales", "column elements", "column scales")
COMMAND = "python -m kosmos_mx vectors"


def cases() -> Iterator[tuple[str, torch.dtype, Format, str]]:
    """(name, dtype of the source, format, scaling) of every comparison."""
    for (source, dtype), form, scaling in product(SOURCES.items(), FORMATS.values(), SCALINGS):
        yield f"{source} {form.name} {scaling}", dtype, form, scaling


def canonical(elements: torch.Tensor) -> torch.Tensor:
    """uint8 of elements, every NaN as 0x7F: which of them a cast gives is not part of a format."""
    bits = elements.contiguous().view(torch.uint8)
    return torch.where(torch.isnan(elements.float()), 0x7F, bits).to(torch.uint8)


def digest(part: torch.Tensor) -> str:
    """Of the bytes of a matrix, row by row."""
    data = part.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:32]


def digests(
    row: tuple[torch.Tensor, torch.Tensor], column: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, str]:
    """Digests of elements and scales of both copies, as they lie upright."""
    parts = (canonical(row[0]), row[1], canonical(column[0]), column[1])
    return dict(zip(PARTS, map(digest, parts), strict=True))


def by_torchao(
    x: torch.Tensor, form: Format, scaling: str
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Row-wise and column-wise (elements, scales) of `x` by torchao's casts.

    Raises:
        ArgumentError: torchao is not installed.
    """
    # By name: it is needed for the comparison alone, so the package does not depend on it.
    try:
        torchao: Any = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    except ImportError as error:
        raise ArgumentError("torchao: not installed here; install torchao==0.18.0") from error
    mode = torchao.ScaleCalculationMode(scaling)
    scales, elements = torchao.to_mx(x, form.dtype, 32, mode)
    turned_scales, turned = torchao.to_mx(x.t().contiguous(), form.dtype, 32, mode)
    return (elements, scales), (turned.t(), turned_scales.t())


def make(counts: tuple[int, ...] = COUNTS) -> dict[str, Any]:
    """The contents of the committed file, by the torchao that is installed.

    Raises:
        ArgumentError: none is.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for count in counts:
        found[str(count)] = {}
        for name, dtype, form, scaling in cases():
            row, column = by_torchao(corpus(count, dtype), form, scaling)
            found[str(count)][name] = digests(row, column)
    return {
        "torchao": importlib.metadata.version("torchao"),
        "torch": str(torch.__version__),
        "command": COMMAND,
        "values": found,
    }


def committed() -> dict[str, Any]:
    """The committed file."""
    path = resources.files("kosmos_mx").joinpath("data").joinpath(FILE)
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded

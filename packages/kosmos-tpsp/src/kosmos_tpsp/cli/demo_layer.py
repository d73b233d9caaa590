"""The layer that the demonstration computes: the column projection of a Llama MLP, on real text."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

# Llama 3: gate and up projection, 8/3 of the hidden size each, rounded up.
INTERMEDIATE = 8 / 3
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    """Sizes of the column projection over all ranks.

    Attributes:
        tokens: rows of the gathered input, m.
        hidden: features of a token, k.
        local_width: columns that each rank computes, n.
        label: what it is.
        seed: of embedding and weights.
    """

    tokens: int
    hidden: int
    local_width: int
    label: str
    seed: int = 0

    def chunk(self, text: bytes, rank: int, world_size: int, device: torch.device) -> torch.Tensor:
        """[tokens / ranks, hidden] bfloat16: this rank's text, embedded and normalised."""
        rows = self.tokens // world_size
        mine = torch.tensor(list(text[rank * rows : (rank + 1) * rows]), dtype=torch.long)
        source = torch.Generator().manual_seed(self.seed)
        embedding = torch.randn(256, self.hidden, generator=source)
        x = embedding[mine].to(device)
        # RMSNorm, as in front of every projection of a Llama block.
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPS)
        return x.to(torch.bfloat16)

    def weights(self, rank: int, device: torch.device) -> torch.Tensor:
        """[local width, hidden] bfloat16: this rank's rows of the gate and up projections."""
        source = torch.Generator(device).manual_seed(self.seed + 1 + rank)
        w = torch.empty(self.local_width, self.hidden, device=device)
        return w.normal_(std=self.hidden**-0.5, generator=source).to(torch.bfloat16)


def small_layer(world_size: int, seed: int = 0) -> Layer:
    """A Llama MLP scaled down for the CPU executor."""
    hidden, rows = 128, 256
    # Whole rows of 16 bytes on every rank.
    multiple = 8 * world_size
    intermediate = -(-int(INTERMEDIATE * hidden) // multiple) * multiple
    label = f"Llama MLP in small: hidden {hidden}, gate and up of {intermediate} each"
    return Layer(rows * world_size, hidden, 2 * intermediate // world_size, label, seed)


def real_layer(seed: int = 0) -> Layer:
    """FC1 of Llama 3 8B, one rank's share at TP 8."""
    return Layer(8192, 4096, 3584, "FC1 of Llama 3 8B, one rank's share at TP 8", seed)


def library_text(num_bytes: int) -> bytes:
    """The first bytes of the running Python's standard library, file after file.

    Raises:
        ValueError: it is not there as source files.
    """
    folder = Path(os.__file__).parent
    files = [path for path in sorted(folder.glob("*.py")) if path.stat().st_size]
    if not files:
        raise ValueError(f"text: no source files of the standard library beside {os.__name__}")
    return bytes(itertools.islice(_bytes_of(files), num_bytes))


def _bytes_of(files: list[Path]) -> Iterator[int]:
    for path in itertools.cycle(files):
        yield from path.read_bytes()

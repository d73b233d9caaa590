"""What is trained on: the source of the running Python's standard library, byte by byte."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

CORPUS_BYTES = 4 << 20


@dataclass(frozen=True)
class Batches:
    """The batch of every step, a function of seed and step alone: the same on every rank.

    Attributes:
        text: [bytes] uint8.
        batch: sequences of a step.
        seq: tokens of a sequence.
        seed: of the order.
    """

    text: torch.Tensor
    batch: int
    seq: int
    seed: int

    @classmethod
    def of_library(cls, batch: int, seq: int, seed: int) -> Batches:
        """Sequences of the standard library's source."""
        text = torch.frombuffer(bytearray(library_text(CORPUS_BYTES)), dtype=torch.uint8)
        return cls(text, batch, seq, seed)

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, targets) of a step, each [batch * seq] int64; a target is the next byte."""
        source = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {step}".encode()))
        last = len(self.text) - self.seq - 1
        starts = torch.randint(last + 1, (self.batch, 1), generator=source)
        windows = self.text[starts + torch.arange(self.seq + 1)].long()
        return windows[:, :-1].flatten(), windows[:, 1:].flatten()

    @property
    def fingerprint(self) -> int:
        """Tells one text from another: another Python has another library."""
        return zlib.crc32(self.text.numpy().tobytes())


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

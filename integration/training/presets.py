"""Sizes of the models, from one for the CPU executor to one with the layers of Llama 3 8B."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import click

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Sizes:
    """A byte-level Llama and the batch that it is trained on.

    Attributes:
        hidden: features of a token.
        intermediate: width of the MLP.
        layers: blocks.
        heads: query heads.
        kv_heads: key and value heads.
        seq: tokens of a sequence.
        batch: sequences of a step.
        rope_theta: base of the rotary embedding's wavelengths.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    seq: int
    batch: int
    rope_theta: float = 500_000.0

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Features of all keys of a token, or of all values."""
        return self.kv_heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, forward and backward, without the optimizer's.

        Two a weight and token forward, twice that backward; of attention's two products the half
        that the causal mask leaves.
        """
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        mlp = 3 * self.hidden * self.intermediate
        weights = self.layers * (attention + mlp) + VOCABULARY * self.hidden
        products = self.layers * self.seq * self.hidden
        return 6.0 * self.tokens * (weights + products)

    def check(self, ranks: int) -> None:
        """Refuses a group that the model cannot be shared among.

        Raises:
            click.UsageError: heads, widths or tokens do not divide.
        """
        for name, value in (
            ("heads", self.heads),
            ("key and value heads", self.kv_heads),
            ("features of the MLP", self.intermediate),
            ("tokens of a step", self.tokens),
        ):
            if value % ranks:
                raise click.UsageError(
                    f"world: the preset's {value} {name} do not divide over {ranks} ranks; "
                    "use 1, 2 or 4 ranks, or 8 with a larger preset"
                )


@dataclass(frozen=True)
class Preset:
    """What a run does unless told otherwise.

    Attributes:
        name: on the command line.
        sizes: of the model.
        steps: optimizer steps.
        lr: highest learning rate.
        warmup: steps until it is reached.
        checkpoint_every: steps between checkpoints; 0 writes none.
    """

    name: str
    sizes: Sizes
    steps: int
    lr: float
    warmup: int
    checkpoint_every: int

    def changed(self, layers: int | None, lr: float | None) -> Preset:
        """The same with another number of blocks or highest learning rate; None keeps it."""
        sizes = self.sizes if layers is None else replace(self.sizes, layers=layers)
        return replace(self, sizes=sizes, lr=self.lr if lr is None else lr)

    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to fit."""
        return {"preset": self.name, "lr": self.lr, **asdict(self.sizes)}


PRESETS = {
    p.name: p
    for p in (
        Preset("tiny", Sizes(64, 160, 2, 8, 4, 64, 4), 40, 1e-2, 5, 1),
        Preset("small", Sizes(1024, 2816, 8, 16, 8, 1024, 16), 300, 1e-3, 30, 100),
        Preset("8b-layer", Sizes(4096, 14336, 4, 32, 8, 8192, 1), 100, 3e-4, 20, 0),
    )
}

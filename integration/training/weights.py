"""Every weight of the model: its full shape, how ranks share it, and what it starts as."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from integration.training.presets import VOCABULARY, Sizes

REPLICATED, COLUMN, ROW = "replicated", "column", "row"


@dataclass(frozen=True)
class Weight:
    """One weight.

    Attributes:
        name: parameter name in the model.
        shape: of the whole weight.
        kind: "replicated": every rank has all of it; "column": ranks share its rows, the outputs;
            "row": ranks share its columns, the inputs.
        std: of its start; None starts with ones.
        blocks: rows of the weights that are stacked in a column-shared one; each is shared by
            itself.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    std: float | None
    blocks: tuple[int, ...] = ()

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices."""
        return len(self.shape) > 1

    def initial(self, seed: int) -> torch.Tensor:
        """The whole weight at the start, fp32 on the CPU; the same for every number of ranks."""
        if self.std is None:
            return torch.ones(self.shape)
        source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {self.name}".encode()))
        return torch.randn(self.shape, generator=source) * self.std

    def shard(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """One rank's part."""
        if self.kind == COLUMN:
            blocks = torch.split(whole, list(self.blocks))
            return torch.cat([block.chunk(ranks)[rank] for block in blocks])
        return whole.chunk(ranks, 1)[rank].contiguous() if self.kind == ROW else whole

    def whole(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """All ranks' parts put together; the inverse of `shard`."""
        if self.kind == COLUMN:
            sizes = [rows // len(shards) for rows in self.blocks]
            parts = [torch.split(shard, sizes) for shard in shards]
            return torch.cat([part for block in zip(*parts, strict=True) for part in block])
        return torch.cat(list(shards), 1) if self.kind == ROW else shards[0]


def weights_of(sizes: Sizes) -> list[Weight]:
    """All weights: replicated vectors first, then replicated matrices, then shared ones."""
    hidden, inter, kv = sizes.hidden, sizes.intermediate, sizes.kv_width
    residual = (2 * sizes.layers) ** -0.5
    names = [f"blocks.{i}" for i in range(sizes.layers)]
    norms = [f"{name}.{norm}" for name in names for norm in ("attention_norm", "mlp_norm")]
    found = [
        Weight(f"{name}.weight", (hidden,), REPLICATED, None) for name in (*norms, "final_norm")
    ]
    found.append(Weight("embedding.weight", (VOCABULARY, hidden), REPLICATED, 1.0))
    # Small, so that training starts from equal odds for every byte.
    found.append(Weight("head.weight", (VOCABULARY, hidden), REPLICATED, 0.1 * hidden**-0.5))
    for name in names:
        std, qkv, pair = hidden**-0.5, (hidden, kv, kv), (inter, inter)
        found += [
            Weight(f"{name}.qkv.weight", (sum(qkv), hidden), COLUMN, std, qkv),
            Weight(f"{name}.attention_out.weight", (hidden, hidden), ROW, std * residual),
            Weight(f"{name}.gate_up.weight", (sum(pair), hidden), COLUMN, std, pair),
            Weight(f"{name}.down.weight", (hidden, inter), ROW, inter**-0.5 * residual),
        ]
    return found

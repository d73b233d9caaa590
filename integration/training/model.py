"""A byte-level Llama: RMSNorm, rotary embedding, grouped queries, SwiGLU, in sequence parallelism.

Between the linear layers of a block every rank has all tokens and its part of the heads or of the
MLP's width; elsewhere it has its part of the tokens, in rank order, and all features.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from integration.training.presets import VOCABULARY, Sizes

NORM_EPS = 1e-5


class Linears(Protocol):
    """Makes the linear layers of a model, without bias."""

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """[tokens / ranks, in] -> [tokens, out / ranks]."""

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """[tokens, in / ranks] -> [tokens / ranks, out]."""


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 width] -> [tokens, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns pairs of features by their position's angle.

    Args:
        x: [batch, seq, heads, head_dim].
        cos: [seq, 1, head_dim / 2] fp32.
        sin: [seq, 1, head_dim / 2] fp32.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of each token."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, features] -> the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


class Block(nn.Module):
    """Attention and MLP, each between a column-parallel and a row-parallel layer.

    Args:
        sizes: of the model.
        ranks: that share it.
        linears: makes the layers.
        compiled: fuse what stands between the layers with torch.compile.
    """

    def __init__(self, sizes: Sizes, ranks: int, linears: Linears, compiled: bool) -> None:
        super().__init__()
        self.sizes = sizes
        # Queries and keys have their own number of heads, each fixed.
        self.swiglu = torch.compile(swiglu, dynamic=False) if compiled else swiglu
        self.rotate = torch.compile(rotate, dynamic=False) if compiled else rotate
        self.heads = [heads // ranks for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
        hidden = sizes.hidden
        self.attention_norm = RMSNorm(hidden)
        self.qkv = linears.column(hidden, hidden + 2 * sizes.kv_width)
        self.attention_out = linears.row(hidden, hidden)
        self.mlp_norm = RMSNorm(hidden)
        self.gate_up = linears.column(hidden, 2 * sizes.intermediate)
        self.down = linears.row(sizes.intermediate, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[tokens / ranks, hidden] -> the same shape."""
        x = x + self.attention_out(self.attend(self.qkv(self.attention_norm(x)), cos, sin))
        y: torch.Tensor = x + self.down(self.swiglu(self.gate_up(self.mlp_norm(x))))
        return y

    def attend(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Causal attention of this rank's heads: [tokens, local qkv] -> [tokens, local width]."""
        s = self.sizes
        q, k, v = torch.split(qkv.view(s.batch, s.seq, -1, s.head_dim), self.heads, dim=2)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(s.tokens, -1)


class Llama(nn.Module):
    """The model, with this rank's part of the weights.

    Args:
        sizes: of the model.
        ranks: that share it.
        linears: makes the column- and row-parallel layers.
        dtype: of weights and activations.
        device: of the weights.
        compiled: fuse what stands between the linear layers with torch.compile.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self,
        sizes: Sizes,
        ranks: int,
        linears: Linears,
        dtype: torch.dtype,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(VOCABULARY, sizes.hidden)
        self.blocks = nn.ModuleList(
            Block(sizes, ranks, linears, compiled) for _ in range(sizes.layers)
        )
        self.final_norm = RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, VOCABULARY, bias=False)
        self.to(device=device, dtype=dtype)
        wave = sizes.rope_theta ** -torch.linspace(0, 1, sizes.head_dim // 2 + 1)[:-1]
        angles = torch.outer(torch.arange(sizes.seq), wave)[:, None]
        self.register_buffer("cos", angles.cos().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(device), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean cross entropy of all tokens; the parts add up to it.

        With a vocabulary of bytes the head is as small as a norm: every rank has all of it and
        computes the logits of its own tokens. Nothing is gathered; its gradient, as those of the
        embedding and the norms, is this rank's tokens' and must be added up over ranks.

        Args:
            tokens: [tokens / ranks] int64, this rank's.
            targets: [tokens / ranks] int64, the bytes after them.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.final_norm(x)).float()
        return F.cross_entropy(logits, targets, reduction="sum") / self.sizes.tokens

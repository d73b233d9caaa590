"""Numbers to quantise: the same on every machine, made of integers alone."""

from __future__ import annotations

import torch

COLS = 256
BLOCK = 32
# How far below the block's largest exponent those of its elements reach, by kind of block.
REACHES = (0, 3, 8, 20, 40)
ENUMERATED, RANDOM_BITS, SPARSE = range(len(REACHES), len(REACHES) + 3)
KINDS = len(REACHES) + 3
# What stands in sparse blocks among zeros, as bits of bf16.
RARE = (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x0001, 0x8001, 0x7F7F, 0x3F80)


def corpus(values: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """[values / 256, 256] whose blocks of 32 x 32 go through all exponents.

    Every kind of block comes with every largest exponent: elements close to one another or far
    apart, all numbers of bf16 in order, random bits, zeros with rare numbers among them.

    Args:
        values: a multiple of 8192.
        dtype: bfloat16, or float32, whose numbers have the lowest 8 bits clear: torchao takes a
            logarithm in FP32, which cannot tell a quotient just above a power of two from it.
        device: where.
    """
    rows = values // COLS
    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    col = torch.arange(COLS, dtype=torch.int64, device=device)[None, :]
    block = row // BLOCK * (COLS // BLOCK) + col // BLOCK
    inside = row % BLOCK * BLOCK + col % BLOCK
    noise = _hash(row * COLS + col)
    kind = (block + block // 256) % KINDS
    top = block % 256

    reach = torch.zeros_like(block)
    for i, most in enumerate(REACHES):
        reach = torch.where(kind == i, most, reach)
    exponent = (top - (noise >> 20) % (reach + 1)).clamp(min=0)
    bits = (noise & 0x807FFFFF) | (exponent << 23)
    enumerated = ((block // KINDS * BLOCK * BLOCK + inside) & 0xFFFF) << 16
    bits = torch.where(kind == ENUMERATED, enumerated | (noise & 0xFF00), bits)
    bits = torch.where(kind == RANDOM_BITS, _hash(noise ^ 0x55555555), bits)
    rare = torch.tensor(RARE, dtype=torch.int64, device=device)[(noise >> 8) % len(RARE)] << 16
    sparse = torch.where(noise % 100 < top % 8, rare, noise & 0x80000000)
    bits = torch.where(kind == SPARSE, sparse, bits)
    if dtype is torch.bfloat16:
        return (bits >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    cleared = bits & 0xFFFFFF00
    return torch.where(cleared >= 1 << 31, cleared - (1 << 32), cleared).to(torch.int32).view(dtype)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits of each integer. Source: Wellons, "lowbias32", public domain."""
    mask = 0xFFFFFFFF
    x = x & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)

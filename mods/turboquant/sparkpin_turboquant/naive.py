"""The executable specification, in plain float32 torch.

A vector ``x`` of a head is stored as codes and one norm. With codes of 2, 3 or 4 bits::

    y     = rotate(x)                          same norm, components like N(0, |x|^2 / D)
    code  = Lloyd-Max cell of sqrt(D) y / |x|  its highest bit: negative; the others: index of the magnitude
    norm  = |x| / |c[code]|                    float16; the norm correction is folded in
    x^    = unrotate(norm * c[code])           so |x^| = |x|

and with 8 bits (keys only)::

    norm  = max |y_i| / 127                    float16
    code  = round(y / norm)                    int8
    x^    = unrotate(norm * code)

c are the centroids rounded to float16, which kernels multiply by. `formats.layout` says where the bytes of a block lie.
"""

from __future__ import annotations

import math

import torch

from sparkpin_turboquant import codebook
from sparkpin_turboquant.formats import GROUP, Format, layout
from sparkpin_turboquant.rotation import rotate, unrotate

FLOAT16_MAX = 65504.0


def centroids(bits: int, device: torch.device | None = None) -> torch.Tensor:
    """``[2^bits]`` float32, by code: the positive ones ascending, then the negative ones."""
    positive = torch.tensor(codebook.magnitudes(bits), dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


def quantise(x: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Code vectors.

    Args:
        x: ``[..., D]`` floating point.
        bits: 2, 3, 4 or 8.

    Returns:
        codes ``[..., D]`` uint8 (8 bits: int8's bits), and norms ``[...]`` float16. A zero vector has norm 0; a norm
        above float16's range is held at 65504.
    """
    y = rotate(x)
    if bits == 8:
        norms = (y.abs().amax(-1) / 127).clamp(max=FLOAT16_MAX).to(torch.float16)
        step = norms.float().unsqueeze(-1)
        codes = torch.where(step > 0, y / torch.where(step > 0, step, torch.ones_like(step)), torch.zeros_like(y))
        return (codes.clamp(-127, 127) + 0.5).floor().to(torch.int8).view(torch.uint8), norms
    length = y.norm(dim=-1)
    unit = y * (math.sqrt(x.shape[-1]) / torch.where(length > 0, length, torch.ones_like(length))).unsqueeze(-1)
    edges = torch.tensor(codebook.edges(bits), dtype=torch.float32, device=x.device)
    codes = torch.bucketize(unit.abs().contiguous(), edges) + (unit < 0).long() * 2 ** (bits - 1)
    norms = (length / centroids(bits, x.device)[codes].norm(dim=-1)).clamp(max=FLOAT16_MAX).to(torch.float16)
    return codes.to(torch.uint8), norms


def dequantise_rotated(codes: torch.Tensor, norms: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """``[..., D]`` float32 in the rotated space."""
    numbers = codes.view(torch.int8).float() if bits == 8 else centroids(bits, codes.device)[codes.long()]
    return numbers * norms.float().unsqueeze(-1)


def dequantise(codes: torch.Tensor, norms: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """``[..., D]`` float32, back in the original space."""
    return unrotate(dequantise_rotated(codes, norms, bits))


def _plane(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """``[..., D]`` numbers below 2^bits -> ``[..., D bits / 8]`` bytes: byte j holds components j, j + D bits / 8,
    ..."""
    many = 8 // bits
    parts = numbers.unflatten(-1, (many, -1)).int() << (bits * torch.arange(many, device=numbers.device)).unsqueeze(-1)
    return parts.sum(-2).to(torch.uint8)


def _unplane(packed: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = (bits * torch.arange(8 // bits, device=packed.device)).unsqueeze(-1)
    return ((packed.int().unsqueeze(-2) >> shifts) & (2**bits - 1)).flatten(-2).to(torch.uint8)


def pack(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """``[..., D]`` codes -> ``[..., D bits / 8]`` bytes. 3 bits: a plane of indices (2 bits), then a plane of signs."""
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat((_plane(codes & 3, 2), _plane(codes >> 2, 1)), dim=-1)
    return _plane(codes, bits)


def unpack(packed: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Inverse of `pack`."""
    if bits == 8:
        return packed
    if bits == 3:
        indices, signs = packed.split([packed.shape[-1] * 2 // 3, packed.shape[-1] // 3], dim=-1)
        return _unplane(indices, 2) | (_unplane(signs, 1) << 2)
    return _unplane(packed, bits)


class Blocks:
    """A cache ``[blocks, heads * block_size * slot]`` of bytes, written and read as `formats.layout` says."""

    def __init__(
        self, data: torch.Tensor, format: Format, heads: int, head_dim: int, block_size: int, slot: int
    ) -> None:
        self.format, self.head_dim, self.block_size = format, head_dim, block_size
        at = layout(format, head_dim, block_size, slot)
        by_head = data.view(data.shape[0], heads, block_size * slot)
        key_bytes, value_bytes = format.key_bytes(head_dim), format.value_bytes(head_dim)
        self.keys = by_head[..., : at.values].unflatten(-1, (block_size, key_bytes))
        self.values = by_head[..., at.values : at.norms].unflatten(-1, (-1, value_bytes, GROUP))
        norms = by_head[..., at.norms : at.norms + 4 * block_size].unflatten(-1, (block_size, 4))
        self.key_norms, self.value_norms = norms[..., :2], norms[..., 2:]

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Code ``key``, ``value`` ``[T, heads, D]`` into slots ``[T]``, which are ``block * block_size + place``."""
        block, place = slots // self.block_size, slots % self.block_size
        codes, norms = quantise(key, self.format.key_bits)
        self.keys[block, :, place] = pack(codes, self.format.key_bits)
        self.key_norms[block, :, place] = norms.unsqueeze(-1).view(torch.uint8)
        codes, norms = quantise(value, self.format.value_bits)
        self.values[block, :, place // GROUP, :, place % GROUP] = pack(codes, self.format.value_bits)
        self.value_norms[block, :, place] = norms.unsqueeze(-1).view(torch.uint8)

    def read_rotated(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value ``[T, heads, D]`` float32 of these slots, in the rotated space."""
        block, place = slots // self.block_size, slots % self.block_size
        key_norms = self.key_norms[block, :, place].contiguous().view(torch.float16).squeeze(-1)
        value_norms = self.value_norms[block, :, place].contiguous().view(torch.float16).squeeze(-1)
        keys = unpack(self.keys[block, :, place], self.format.key_bits)
        values = unpack(self.values[block, :, place // GROUP, :, place % GROUP], self.format.value_bits)
        return (
            dequantise_rotated(keys, key_norms, self.format.key_bits),
            dequantise_rotated(values, value_norms, self.format.value_bits),
        )


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal grouped-query attention of the last Q positions of one sequence.

    Args:
        query: ``[Q, H, D]``; query i stands at position S - Q + i.
        key, value: ``[S, Hkv, D]``, H divisible by Hkv; query head h reads KV head ``h // (H / Hkv)``.

    Returns:
        ``[Q, H, D]`` float32.
    """
    queries, heads, _ = query.shape
    length, kv_heads, _ = key.shape
    group = heads // kv_heads
    scores = torch.einsum("qhd,shd->hqs", query.float(), key.float().repeat_interleave(group, dim=1)) * scale
    positions = torch.arange(length, device=query.device)
    last = torch.arange(length - queries, length, device=query.device)
    scores = scores.masked_fill(positions[None, :] > last[:, None], -math.inf)
    return torch.einsum("hqs,shd->qhd", scores.softmax(dim=-1), value.float().repeat_interleave(group, dim=1))


def attend(query: torch.Tensor, blocks: Blocks, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of ``query`` ``[Q, H, D]`` over the tokens in ``slots`` ``[S]``: computed in the rotated space."""
    key, value = blocks.read_rotated(slots)
    return unrotate(attention(rotate(query), key, value, scale))

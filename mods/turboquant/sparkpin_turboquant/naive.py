"""The executable specification, in plain float32 torch.

A vector ``x`` of a head is stored as codes and one norm. With codes of 4 bits::

    y     = rotate(x)                          same norm, components like N(0, |x|^2 / D)
    code  = Lloyd-Max cell of sqrt(D) y / |x|  its highest bit: negative; the others: index of the magnitude
    norm  = |x| / |c[code]|                    float16; the norm correction is folded in
    x^    = unrotate(norm * c[code])           so |x^| = |x|

and with 8 bits (keys only)::

    norm  = max |y_i| / 127                    float16
    code  = round(y / norm)                    int8
    x^    = unrotate(norm * code)

A vector with NaN has the norm NaN; a norm above float16's range, infinity included, is held at 65504.

c are the centroids rounded to 8 significant bits, exact in float16 and in bfloat16. `formats.layout` says where the
bytes of a block lie.
"""

from __future__ import annotations

import math

import torch

from sparkpin_turboquant import codebook
from sparkpin_turboquant.formats import GROUP, Format, layout
from sparkpin_turboquant.rotation import rotate, unrotate

FLOAT16_MAX = 65504.0


def centroids(device: torch.device | None = None) -> torch.Tensor:
    """``[16]`` float32, by code: the positive ones ascending, then the negative ones."""
    positive = torch.tensor(codebook.magnitudes(), dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


def quantise(x: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Code vectors.

    Args:
        x: ``[..., D]`` floating point.
        bits: 4 or 8.

    Returns:
        codes ``[..., D]`` uint8 (8 bits: int8's bits), and norms ``[...]`` float16. A zero vector has norm 0.
    """
    y = rotate(x)
    if bits == 8:
        norms = (y.abs().amax(-1) / 127).clamp(max=FLOAT16_MAX).to(torch.float16)
        step = norms.float().unsqueeze(-1)
        codes = torch.where(step > 0, y / torch.where(step > 0, step, torch.ones_like(step)), torch.zeros_like(y))
        return (codes.clamp(-127, 127) + 0.5).floor().to(torch.int8).view(torch.uint8), norms
    length = y.norm(dim=-1)
    unit = y * (math.sqrt(x.shape[-1]) / torch.where(length > 0, length, torch.ones_like(length))).unsqueeze(-1)
    edges = torch.tensor(codebook.edges(), dtype=torch.float32, device=x.device)
    codes = torch.bucketize(unit.abs().contiguous(), edges) + (unit < 0).long() * 8
    norms = (length / centroids(x.device)[codes].norm(dim=-1)).clamp(max=FLOAT16_MAX).to(torch.float16)
    return codes.to(torch.uint8), norms


def dequantise_rotated(codes: torch.Tensor, norms: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """``[..., D]`` float32 in the rotated space."""
    numbers = codes.view(torch.int8).float() if bits == 8 else centroids(codes.device)[codes.long()]
    return numbers * norms.float().unsqueeze(-1)


def dequantise(codes: torch.Tensor, norms: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """``[..., D]`` float32, back in the original space."""
    return unrotate(dequantise_rotated(codes, norms, bits))


def pack_keys(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``[..., D]`` codes -> ``[..., D bits / 8]`` bytes, as `formats.Layout` says; words are little-endian."""
    if bits == 8:
        return codes
    eights = codes.unflatten(-1, (-1, 8)).int()
    size, sign = eights & 7, eights >> 3
    # Byte i of a word: magnitudes of codes 2 i, 2 i + 1; signs of codes i + 4, i.
    out = size[..., ::2] | size[..., 1::2] << 4 | sign[..., 4:] << 3 | sign[..., :4] << 7
    return out.flatten(-2).to(torch.uint8)


def unpack_keys(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `pack_keys`."""
    if bits == 8:
        return packed
    fours = packed.unflatten(-1, (-1, 4)).int()
    size = torch.stack((fours & 7, fours >> 4 & 7), dim=-1).flatten(-2)
    sign = torch.cat((fours >> 7, fours >> 3 & 1), dim=-1)
    return (size | sign << 3).flatten(-2).to(torch.uint8)


def pack_values(codes: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` codes -> ``[..., D / 2]`` bytes: those of `formats.Layout`, in the order of `value_places`."""
    low, high = codes.unflatten(-1, (-1, 2, 8)).int().unbind(-2)
    return (low | high << 4).flatten(-2).to(torch.uint8)


def unpack_values(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack_values`."""
    eights = packed.unflatten(-1, (-1, 8))
    return torch.stack((eights & 15, eights >> 4), dim=-2).flatten(-3)


def value_places(head_dim: int) -> torch.Tensor:
    """``[D / 2, GROUP]``: where byte j of token n lies among those of its GROUP tokens; see `formats.Layout`."""
    n, j = torch.arange(GROUP), torch.arange(head_dim // 2).unsqueeze(-1)
    return j // 16 * 256 + j % 8 * 32 + n // 4 * 8 + j // 8 % 2 * 4 + n % 4


class Blocks:
    """A cache ``[blocks, heads * block_size * slot]`` of bytes, written and read as `formats.layout` says."""

    def __init__(
        self, data: torch.Tensor, format: Format, heads: int, head_dim: int, block_size: int, slot: int
    ) -> None:
        self.format, self.head_dim, self.block_size = format, head_dim, block_size
        at = layout(format, head_dim, block_size, slot)
        by_head = data.view(data.shape[0], heads, block_size * slot)
        self.keys = by_head[..., : at.values].unflatten(-1, (block_size, format.key_bytes(head_dim)))
        self.values = by_head[..., at.values : at.norms].unflatten(-1, (-1, head_dim // 2 * GROUP))
        self.places = value_places(head_dim).to(data.device)
        norms = by_head[..., at.norms : at.norms + 4 * block_size].unflatten(-1, (block_size, 4))
        self.key_norms, self.value_norms = norms[..., :2], norms[..., 2:]

    def _values_of(self, block: torch.Tensor, place: torch.Tensor) -> tuple[torch.Tensor | slice, ...]:
        """Index of ``[T, D / 2, heads]`` bytes in `values`."""
        group = (place // GROUP).unsqueeze(-1)
        return block.unsqueeze(-1), slice(None), group, self.places.T[place % GROUP]

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Code ``key``, ``value`` ``[T, heads, D]`` into slots ``[T]``, which are ``block * block_size + place``."""
        block, place = slots // self.block_size, slots % self.block_size
        codes, norms = quantise(key, self.format.key_bits)
        self.keys[block, :, place] = pack_keys(codes, self.format.key_bits)
        self.key_norms[block, :, place] = norms.unsqueeze(-1).view(torch.uint8)
        codes, norms = quantise(value)
        self.values[*self._values_of(block, place)] = pack_values(codes).transpose(1, 2)
        self.value_norms[block, :, place] = norms.unsqueeze(-1).view(torch.uint8)

    def read_rotated(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value ``[T, heads, D]`` float32 of these slots, in the rotated space."""
        block, place = slots // self.block_size, slots % self.block_size
        key_norms = self.key_norms[block, :, place].contiguous().view(torch.float16).squeeze(-1)
        value_norms = self.value_norms[block, :, place].contiguous().view(torch.float16).squeeze(-1)
        keys = unpack_keys(self.keys[block, :, place], self.format.key_bits)
        values = unpack_values(self.values[*self._values_of(block, place)].transpose(1, 2))
        return dequantise_rotated(keys, key_norms, self.format.key_bits), dequantise_rotated(values, value_norms)


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
    """Attention of ``query`` ``[Q, H, D]`` over the tokens in ``slots`` ``[S]``: computed in the rotated space.

    A rotated query's components are held at float16's range, as kernels do; a query that is NaN gives NaN.
    """
    key, value = blocks.read_rotated(slots)
    return unrotate(attention(rotate(query).clamp(-FLOAT16_MAX, FLOAT16_MAX), key, value, scale))

"""The executable specification, in plain float32 torch.

A vector ``x`` of a head (a key or a value) is stored as codes and one norm::

    y     = rotate(x)                          same norm, components like N(0, |x|^2 / D)
    code  = Lloyd-Max cell of sqrt(D) y / |x|  4 bits each
    norm  = |x| / |c[code] / sqrt(D)|          float16; the norm correction is folded in
    x^    = unrotate(norm * c[code] / sqrt(D)) so |x^| = |x|

A slot holds one token of one KV head::

    bytes 0 .. D/2            codes of the key, component 2i in the low and 2i+1 in the high four bits of byte i
    bytes D/2 .. D            codes of the value
    bytes D .. D+2, D+2 .. D+4  norm of the key, of the value, float16 little-endian
"""

from __future__ import annotations

import math

import torch

from sparkpin_turboquant import codebook
from sparkpin_turboquant.rotation import check_head_dim, rotate, unrotate

FLOAT16_MAX = 65504.0


def slot_bytes(head_dim: int) -> int:
    """Bytes of key and value of one token and KV head."""
    check_head_dim(head_dim)
    return head_dim + 4


def centroids(device: torch.device | None = None) -> torch.Tensor:
    """``[16]`` float32."""
    return torch.tensor(codebook.lloyd_max(), dtype=torch.float32, device=device)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Code vectors.

    Args:
        x: ``[..., D]`` floating point.

    Returns:
        codes ``[..., D]`` uint8 in 0..15, and norms ``[...]`` float16 with the norm correction folded in. A zero vector
        has norm 0; a norm above float16's range is held at 65504.
    """
    head_dim = x.shape[-1]
    y = rotate(x)
    norm = y.norm(dim=-1)
    unit = y * (math.sqrt(head_dim) / torch.where(norm > 0, norm, torch.ones_like(norm))).unsqueeze(-1)
    edges = torch.tensor(codebook.boundaries(), dtype=torch.float32, device=x.device)
    codes = torch.bucketize(unit.contiguous(), edges)
    quantised_norm = centroids(x.device)[codes].norm(dim=-1) / math.sqrt(head_dim)
    corrected = (norm / quantised_norm).clamp(max=FLOAT16_MAX).to(torch.float16)
    return codes.to(torch.uint8), corrected


def dequantise_rotated(codes: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` float32 in the rotated space: ``norm * c[code] / sqrt(D)``."""
    scale = norms.float() / math.sqrt(codes.shape[-1])
    return centroids(codes.device)[codes.long()] * scale.unsqueeze(-1)


def dequantise(codes: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` float32, back in the original space."""
    return unrotate(dequantise_rotated(codes, norms))


def pack(codes: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` uint8 codes below 16 -> ``[..., D/2]`` uint8."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `pack`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``key``, ``value`` ``[..., D]`` -> slots ``[..., D + 4]`` uint8."""
    key_codes, key_norm = quantise(key)
    value_codes, value_norm = quantise(value)
    norms = torch.stack((key_norm, value_norm), dim=-1).view(torch.uint8)
    return torch.cat((pack(key_codes), pack(value_codes), norms), dim=-1)


def split(slots: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots ``[..., >= D + 4]`` uint8 -> key codes, key norms, value codes, value norms, as `quantise` gives them."""
    half = head_dim // 2
    norms = slots[..., head_dim : head_dim + 4].contiguous().view(torch.float16)
    return unpack(slots[..., :half]), norms[..., 0], unpack(slots[..., half:head_dim]), norms[..., 1]


def decode(slots: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots ``[..., >= D + 4]`` uint8 -> key and value ``[..., D]`` float32."""
    key_codes, key_norm, value_codes, value_norm = split(slots, head_dim)
    return dequantise(key_codes, key_norm), dequantise(value_codes, value_norm)


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

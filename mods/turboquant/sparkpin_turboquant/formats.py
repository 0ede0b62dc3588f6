"""The cache's formats: how many bits a key and a value take, under which name vLLM knows them, where their bytes lie.

Importing this imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 16
"""Tokens whose values lie together; a block's tokens are a multiple of it."""
HEAD_DIMS = (64, 128, 256)
"""On a GPU."""


@dataclass(frozen=True)
class Format:
    """key_bits 8: int8; 4: Lloyd-Max codes, as values always are."""

    name: str
    key_bits: int

    def key_bytes(self, head_dim: int) -> int:
        return head_dim * self.key_bits // 8

    def slot_bytes(self, head_dim: int) -> int:
        """Bytes of a token and KV head: codes of key and value, and two float16 norms."""
        return self.key_bytes(head_dim) + head_dim // 2 + 4


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes within a block for one KV head; heads lie one after another, ``slot * block_size`` apart.

    A block is what vLLM pages by. Its parts are kept apart, so that each is read in whole aligned pieces::

        keys         [block_size, key_bytes]
        values       [block_size / 16, 8 D]                 16 tokens side by side
        norms        [block_size, 2] float16                key's, value's

    Below, a code is a sign and the index m of a magnitude, words are of 32 bits, and i counts from their lowest bit.
    One load of a lane of a GPU is what it needs of a product's operand, and few instructions make numbers of it.

    Keys of 8 bits: int8. 4 bits: word w has components 8 w + n, m at i = 4 n, the sign at 8 n + 7 for n < 4 and at
    8 n - 29 for the rest.

    Values: a token's components are taken in pairs, 16 r + g and 16 r + 8 + g with g < 8. Byte (r, g) has the one's
    code in its lower half. `naive.value_places` says where the bytes of 16 tokens lie: those of tokens 4 t to 4 t + 3
    are one word.
    """

    block_size: int
    slot: int
    values: int
    norms: int


def layout(format: Format, head_dim: int, block_size: int, slot: int) -> Layout:
    """Where the parts lie.

    Args:
        block_size: tokens of a block, a multiple of GROUP.
        slot: bytes reserved for each token and head, at least ``format.slot_bytes``.
    """
    if block_size % GROUP or block_size <= 0:
        raise ValueError(f"turboquant: block size {block_size}, expected a multiple of {GROUP}")
    if slot < format.slot_bytes(head_dim):
        raise ValueError(f"turboquant: {slot} bytes a slot, expected {format.slot_bytes(head_dim)} for {format.name}")
    values = block_size * format.key_bytes(head_dim)
    norms = values + block_size * head_dim // 2
    return Layout(block_size, slot, values, norms)


FORMATS = {format.name: format for format in (Format("turboquant_k8v4", 8), Format("turboquant_4bit_nc", 4))}
"""By vLLM's name of the cache type."""


def format_of(name: str) -> Format:
    """The format of a cache type. Raises ValueError with those that there are."""
    if name not in FORMATS:
        raise ValueError(f"turboquant: --kv-cache-dtype {name}, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]

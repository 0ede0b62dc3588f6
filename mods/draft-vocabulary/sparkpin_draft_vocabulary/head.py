"""Rows of an LM head that stand for a head of their own in vLLM's `LogitsProcessor.get_top_tokens`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from sparkpin_modkit import ModError
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbeddingShardIndices,
)

ROWS_MULTIPLE = 64
"""vLLM pads a vocabulary to such a number of rows, so that is what kernels were compiled for."""


@runtime_checkable
class SelectsRows(Protocol):
    """A head's quantisation method that can take some rows out of its own form of a head, as int8-lm-head's."""

    def select_rows(self, layer: torch.nn.Module, index: torch.Tensor, into: torch.nn.Module, bits: int = 8) -> None:
        """Give `into` what ``apply(into, x)`` needs for logits ``[..., N]``; index: ``[N]`` int64, rows of `layer`;
        bits: of a weight, 8 or 4."""


class WholeHead:
    """All logits, then those of the list: what is left where vLLM keeps no rows, but packs them for a CPU."""

    def __init__(self, head: torch.nn.Module, index: torch.Tensor) -> None:
        self.head, self.index = head, index

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` ``[..., K]`` -> ``[..., N]``."""
        method: Any = self.head.quant_method
        logits: torch.Tensor = method.apply(self.head, x)[..., self.index]
        return logits if bias is None else logits + bias


class Rows(torch.nn.Module):
    """The rows of `head` for some tokens, and what else vLLM asks of a head.

    Of a head in shards each rank keeps the rows of its own tokens. vLLM takes the best of each rank and adds the rank's
    first row to it; so all rows count through, those of rank 0 first, and one table on every rank leads back to tokens.
    Rows that fill up to ROWS_MULTIPLE repeat the rank's first one, and lead to the same token; where a rank has none of
    the tokens, they are masked.

    tokens: of all ranks, ascending; offsets: ``[N of all ranks]`` int64, what turns a row into its token, as vLLM's
    ``draft_id_to_target_id``; own: how many of the tokens are this rank's; kind: for the report. bits: 4 for rows that
    int8-lm-head makes of its own.
    """

    def __init__(self, head: torch.nn.Module, tokens: list[int], device: torch.device, bits: int = 8) -> None:
        super().__init__()
        self.tp_size: int = head.tp_size
        width = head.org_vocab_size_padded // self.tp_size
        shards = [[token for token in tokens if token // width == rank] for rank in range(self.tp_size)]
        padded = [filled(shard, width * rank) for rank, shard in enumerate(shards)]
        table = torch.tensor([token for rows in padded for token in rows], dtype=torch.int64, device=device)
        self.register_buffer("offsets", table - torch.arange(len(table), device=device), persistent=False)
        rank, self.own = head.tp_rank, len(shards[head.tp_rank])
        start, count = sum(map(len, padded[:rank])), len(padded[rank])
        end = start + (count if self.own else 0)
        self.shard_indices = VocabParallelEmbeddingShardIndices(start, start + count, 0, 0, start, end, 0, 0)
        index = table[start : start + count] - width * rank
        self.quant_method: Any = head.quant_method
        if isinstance(self.quant_method, SelectsRows):
            self.quant_method.select_rows(head, index, self, bits)
            self.kind = type(self.quant_method).__name__ + (", 4 bits" if bits == 4 else "")
        elif bits == 4:
            raise ModError(
                "draft-vocabulary: --additional-config: draft_head: the LM head is "
                f"{type(self.quant_method).__name__}'s, expected int8-lm-head's, which makes rows of 4 bits: leave "
                "draft_head out, or set SPARKPIN_MOD_DRAFT_VOCABULARY=0"
            )
        elif type(self.quant_method) not in (UnquantizedEmbeddingMethod, UnquantizedLinearMethod):
            raise ModError(
                f"draft-vocabulary: the LM head is quantised ({type(self.quant_method).__name__}), expected a 16-bit "
                "one or int8-lm-head's; set SPARKPIN_MOD_DRAFT_VOCABULARY=0"
            )
        elif head.weight.numel():
            self.weight = torch.nn.Parameter(head.weight.data[index], requires_grad=False)
            self.quant_method.process_weights_after_loading(self)
            self.kind = str(head.weight.dtype).removeprefix("torch.")
        else:
            self.quant_method = WholeHead(head, index)
            self.kind = "the whole head, then the list"

    @property
    def nbytes(self) -> int:
        """What the rows take besides the head."""
        own = (tensor for name, tensor in (*self.named_parameters(), *self.named_buffers()) if name != "offsets")
        return sum(tensor.numel() * tensor.element_size() for tensor in own)


def filled(tokens: list[int], first: int) -> list[int]:
    """A rank's tokens with the first one again up to a multiple of ROWS_MULTIPLE; `first` in place of none."""
    some = tokens or [first]
    return some + some[:1] * (-len(some) % ROWS_MULTIPLE)

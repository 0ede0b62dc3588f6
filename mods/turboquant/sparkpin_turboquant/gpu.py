"""The attention backend for vLLM's CUDA platform.

Requests of up to ``1 + num_speculative_tokens`` new tokens are decode steps, run by the kernels of `cuda` and captured
in full CUDA graphs; they come first in a batch. The others are `prefill`'s.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from sparkpin_modkit import kernels, reporting_failure
from sparkpin_modkit.selfcheck import once
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparkpin_turboquant import MOD, VERSION, cuda, prefill, selfcheck
from sparkpin_turboquant.common import PackedBackend, PackedImpl, report_active
from sparkpin_turboquant.formats import HEAD_DIMS
from sparkpin_turboquant.tuned import Tuned, piece_of, splits_of, tuned_for

BLOCK_SIZE = 128
"""Tokens of a block are a multiple of it: a page of that many is what was measured."""


@cache
def _gpu(device: torch.device) -> tuple[Tuned, int]:
    """Tiles for this GPU, and its multiprocessors."""
    major, minor = torch.cuda.get_device_capability(device)
    return tuned_for(major * 10 + minor), torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _workspace(heads: int, head_dim: int, device: torch.device) -> prefill.Workspace:
    """One for all layers, which run one after another. First asked for while vLLM measures what memory it needs."""
    return prefill.Workspace.of(heads, head_dim, device)


class GpuBackend(PackedBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]

    @staticmethod
    def get_impl_cls() -> type[GpuImpl]:
        return GpuImpl

    @staticmethod
    def get_builder_cls() -> type[GpuMetadataBuilder]:
        return GpuMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_SIZE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


@dataclass
class GpuMetadata:
    """What one step needs. decodes: requests that are decode steps, the first ones; most_queries: of any of them."""

    lengths: torch.Tensor
    starts: torch.Tensor
    table: torch.Tensor
    decodes: int
    decode_tokens: int
    most_queries: int
    prefill: prefill.Prefill | None


class GpuMetadataBuilder(AttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    room, few, piece, joined = 0, 0, 1, 0  # see `prefill.plan`

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        slot = int(kv_cache_spec.state_content_bytes)
        layers = vllm_config.compilation_config.static_forward_context
        impl = layers[layer_names[0]].impl
        kernels.warm(MOD, lambda: impl.warm_up(kv_cache_spec.block_size, slot, vllm_config, self.widths(), device))
        impl.check(kv_cache_spec.block_size, slot, vllm_config, self.widths(), device)
        self.room = prefill.room_of(impl.num_kv_heads, impl.head_size)
        tuned, _ = _gpu(device)
        self.few, self.joined = tuned.few, tuned.joined
        self.piece = piece_of(impl.num_heads // impl.num_kv_heads)
        report_active(kv_cache_spec.head_size, len(layer_names), slot)

    def widths(self) -> tuple[int, ...]:
        """Query tokens for which there are decode kernels: one, and as many as a verification step has."""
        return tuple(sorted({1, int(self.reorder_batch_threshold or 1)}))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> GpuMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("turboquant: attention that is not causal")
        widths = self.widths()
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(common, decode_threshold=widths[-1])
        planned = None
        if prefills:
            starts = common.query_start_loc_cpu[decodes:].tolist()
            lengths = common.seq_lens_cpu_upper_bound  # exact for these requests
            # Every runner gives it; only the capture of a DFlash drafter's graphs does not, which has no prefill. Other
            # lengths wait for the GPU.
            if lengths is None:
                lengths = common.seq_lens
            lengths = lengths[decodes : decodes + prefills].tolist()
            starts = [start - starts[0] for start in starts]
            planned = prefill.plan(starts, lengths, self.device, self.room, self.few, self.piece, self.joined)
        return GpuMetadata(
            lengths=common.seq_lens,
            starts=common.query_start_loc,
            table=common.block_table_tensor,
            decodes=decodes,
            decode_tokens=decode_tokens,
            most_queries=1 if common.max_query_len <= 1 else widths[-1],
            prefill=planned,
        )


class GpuImpl(PackedImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flash = self.find_flash()
        self.known: tuple[tuple[int, ...], cuda.Cache] | None = None

    def find_flash(self) -> prefill.Attend:
        from sparkpin_turboquant.flash import flash_attention  # not to be imported where there is no GPU

        return flash_attention(self.head_size, self.scale)

    def cache(self, kv_cache: torch.Tensor) -> cuda.Cache:
        """The cache as the kernels take it; made once for each tensor that vLLM hands over."""
        key = (kv_cache.data_ptr(), *kv_cache.shape, *kv_cache.stride())
        if self.known is None or self.known[0] != key:
            rows = self.rows(kv_cache)
            block_size, slot = kv_cache.shape[2:]
            made = cuda.Cache(rows, self.format, self.num_kv_heads, self.head_size, block_size, slot, rows.stride(0))
            self.known = (key, made)
        return self.known[1]

    @torch.inference_mode()
    def warm_up(
        self, block_size: int, slot: int, vllm_config: Any, widths: tuple[int, ...], device: torch.device
    ) -> None:
        """Load each kernel that a server of this configuration launches, on a cache of one block.

        Raises ValueError for verification steps of more query tokens than the kernel takes.
        """
        splits_of(widths[-1], self.num_heads // self.num_kv_heads)
        dtype = vllm_config.model_config.dtype
        page = block_size * self.num_kv_heads * slot
        data = torch.zeros(1, page, dtype=torch.uint8, device=device)
        cache_ = cuda.Cache(data, self.format, self.num_kv_heads, self.head_size, block_size, slot, page)
        tuned, processors = _gpu(device)
        new = torch.zeros(1, self.num_kv_heads, self.head_size, dtype=dtype, device=device)
        cuda.store_tokens(new, new, cache_, torch.zeros(1, dtype=torch.int64, device=device))
        group = self.num_heads // self.num_kv_heads
        cuda.prepare(cache_.format, self.head_size, group, max(widths[-1], piece_of(group)), tuned)
        for width in widths:
            query = torch.zeros(width, self.num_heads, self.head_size, dtype=dtype, device=device)
            starts = torch.tensor([0, width], dtype=torch.int32, device=device)
            table = torch.zeros(1, 1, dtype=torch.int32, device=device)
            out = torch.empty_like(query)
            cuda.attend(query, cache_, table, starts[1:], starts, width, self.scale, out, tuned, processors)
        query = torch.zeros(1, self.num_heads, self.head_size, dtype=dtype, device=device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        space = _workspace(self.num_kv_heads, self.head_size, device)
        for joined in {0, min(tuned.joined, 1)}:
            planned = prefill.plan([0, 1], [2], device, 16, joined=joined)  # a new token after one in the cache
            rest = (space, self.flash, torch.empty_like(query), tuned.overlap)
            prefill.attend(query, new, new, cache_, table, planned, *rest)

    def check(
        self, block_size: int, slot: int, vllm_config: Any, widths: tuple[int, ...], device: torch.device
    ) -> None:
        """Compare the kernels with naive.py at this machine's first start. Raises ModError where they differ."""
        tuned, processors = _gpu(device)
        group = self.num_heads // self.num_kv_heads
        queries = tuple(sorted({*range(1, widths[-1] + 1), piece_of(group)}))
        dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        heads, head_dim = self.num_kv_heads, self.head_size
        case = selfcheck.Case(self.format.name, heads, group, head_dim, block_size, slot, queries, dtype)
        with reporting_failure(MOD, version=VERSION):
            once(MOD, VERSION, asdict(case), lambda: selfcheck.compare(case, tuned, processors, device, self.flash))
        torch.cuda.empty_cache()  # what vLLM has planned with

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Encode ``key``, ``value`` ``[>= T, Hkv, D]`` into the slots ``slot_mapping`` ``[T]`` (negative: padding)."""
        if kv_cache.numel():
            cuda.store_tokens(key, value, self.cache(kv_cache), slot_mapping.flatten())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: GpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query`` ``[T, H, D]`` -> `output` of its shape or ``[T, H * D]``; tokens of no request stay as they are."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("turboquant: fused output quantisation")
        if attn_metadata is None:  # vLLM measures what memory a step needs: a prefill's, besides queries and output
            _workspace(self.num_kv_heads, self.head_size, query.device)
            torch.empty(2, *output.shape, dtype=torch.float16, device=output.device)
            return output.zero_()
        step = attn_metadata
        query = query.view(-1, self.num_heads, self.head_size)
        out = output.view(-1, self.num_heads, self.head_size)
        cache_ = self.cache(kv_cache)
        first = step.decode_tokens
        tuned, processors = _gpu(query.device)
        if step.decodes:
            cuda.attend(
                query[:first],
                cache_,
                step.table[: step.decodes],
                step.lengths[: step.decodes],
                step.starts[: step.decodes + 1],
                step.most_queries,
                self.scale,
                out[:first],
                tuned,
                processors,
            )
        if step.prefill:
            new = slice(first, first + step.prefill.tokens)
            table, few = step.table[step.decodes :], step.prefill.few
            if few:
                at, of = (table, few.lengths, few.starts), (out[new], tuned, processors, few.owners)
                cuda.attend(query[new], cache_, *at, few.most_queries, self.scale, *of)
                return output
            space = _workspace(self.num_kv_heads, self.head_size, query.device)
            key, value = (x.view(-1, self.num_kv_heads, self.head_size)[new] for x in (key, value))
            rest = (step.prefill, space, self.flash, out[new], tuned.overlap)
            prefill.attend(query[new], key, value, cache_, table, *rest)
        return output

"""The quantisation method that takes the place of the head's own."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from sparkpin_modkit import ModError, report, reporting_failure
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from sparkpin_int8_lm_head import MOD, VERSION, int4
from sparkpin_int8_lm_head.cpu import int8_linear, padded
from sparkpin_int8_lm_head.quantise import Int8Head, quantise_head, same_head, slices
from sparkpin_int8_lm_head.tuned import Tuned

MIB = 2**20

_heads: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Heads of this process, so that a drafter whose head is the target's takes no memory of its own."""

_numbers = itertools.count()

UNLOADED = -1
"""All bits of a weight that nobody has loaded: no number, and not the NaN that arithmetic gives."""


class Int8LMHeadMethod(QuantizeMethodBase):
    """Lets `inner` create and load the weight, then replaces it by its INT8 form."""

    def __init__(self, inner: QuantizeMethodBase) -> None:
        self.inner = inner
        self.tied = False
        self.has_column_scale = False
        self.tuned: Mapping[int, Tuned] | None = None  # of the GPU; None on a CPU
        self.tuned_int4: Mapping[int, Tuned] = {}
        self.float32 = not drafts_are_sampled()

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        self.inner.create_weights(layer, *weight_args, **extra_weight_attrs)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """The embedding keeps its 16-bit weight for looking up tokens; the head gets INT8 codes of its own."""
        layer.weight = embed_tokens.weight
        self.tied = True
        return layer

    def is_unloaded(self, layer: torch.nn.Module) -> bool:
        """Whether nothing came for it: a drafter without a head of its own, which vLLM gives the target's next."""
        return bool((bits(layer.weight)[[0, -1]] == UNLOADED).all())

    def mark_unloaded(self, layer: torch.nn.Module) -> None:
        if not layer.weight.is_meta:
            bits(layer.weight).fill_(UNLOADED)

    def take(self, layer: torch.nn.Module) -> Int8Head:
        """The head's INT8 form; what was loaded leaves the layer.

        The parameter goes rather than becoming an empty one: vLLM compares the weights of a target's and a drafter's
        head to decide whether to share them, and two empty tensors are equal. `mark` puts a number in its place.
        """
        weight = layer.weight.data
        self.dtype = weight.dtype
        self.kernel = self.choose_kernel(weight.dtype, weight.device)
        head = quantise_head(weight, self.memory(*weight.shape, weight.device))
        del layer.weight
        return head

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.weight.is_meta:  # vLLM took the memory away: a pooling model, which never computes its head
            return
        if self.is_unloaded(layer):
            del layer.weight
            mark(layer, None)
            return
        with reporting_failure(MOD, version=VERSION), torch.no_grad():
            head = self.take(layer)
            twin = next((other for other in _heads if same_head(_of(other), head)), None)
            if twin is not None:
                head = _of(twin)
            mark(layer, twin)
            layer.register_buffer("weight_int8", head.q, persistent=False)
            layer.register_buffer("weight_row_scale", head.row_scale, persistent=False)
            layer.register_buffer("weight_column_scale", head.column_scale, persistent=False)
            layer.int8_head = head
            self.has_column_scale = head.outlier_columns > 0
            if self.tuned is not None and twin is None:
                self._rehearse(layer)
            _heads.add(layer)
            rows, columns = head.row_scale.numel(), head.column_scale.numel()
        report(
            MOD,
            "active",
            version=VERSION,
            V=rows,
            K=columns,
            kernel=self.kernel,
            mib_before=round(rows * columns * self.dtype.itemsize / MIB, 3),
            mib_after=round(head.nbytes / MIB, 3),
            outlier_columns=head.outlier_columns,
            alpha=head.alpha,
            weight_error=round(head.error, 5),
            **({"tied": True} if self.tied else {}),
            **({"shared": True} if twin is not None else {}),
        )

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` ``[..., K]`` -> logits ``[..., V]``: on a CPU of the same type, on a GPU see `cuda.int8_linear`."""
        rows = x.reshape(-1, x.shape[-1])
        column_scale = layer.weight_column_scale if self.has_column_scale else None
        if self.tuned is not None:
            from sparkpin_int8_lm_head import cuda

            scales = layer.weight_row_scale, column_scale
            if hasattr(layer, "weight_int4"):
                out = cuda.int4_linear(rows, layer.weight_int4, *scales, self.tuned_int4).view(*x.shape[:-1], -1)
                return out if bias is None else out + bias
            out = cuda.int8_linear(rows, layer.weight_int8, *scales, bias, self.tuned, float32=self.float32)
            return out.view(*x.shape[:-1], -1)
        if column_scale is not None:
            rows = rows * column_scale
        out = int8_linear(rows, layer.weight_int8, layer.weight_row_scale).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def select_rows(self, layer: torch.nn.Module, index: torch.Tensor, into: torch.nn.Module, bits: int = 8) -> None:
        """Give `into` a copy of some rows of `layer`'s head: ``apply(into, x)`` are its logits in their columns.

        Args:
            index: ``[N]`` int64, N a multiple of 64 as vLLM's vocabularies are, so that it needs no kernel of its own.
            bits: 8, or 4: `int4.quantise` of the rows. On a CPU those keep the INT8 form, and its bytes.
        """
        head = _of(layer)
        if bits == 4:
            self._select_int4(head, index, into)
            return
        q = self.memory(index.numel(), head.column_scale.numel(), head.q.device)
        for part in slices(index.numel()):
            q[part] = head.q[index[part]]
        into.register_buffer("weight_int8", q, persistent=False)
        into.register_buffer("weight_row_scale", head.row_scale[index], persistent=False)
        into.register_buffer("weight_column_scale", head.column_scale, persistent=False)
        if self.tuned is not None:
            self._try(into)

    def _select_int4(self, head: Int8Head, index: torch.Tensor, into: torch.nn.Module) -> None:
        rows, columns = index.numel(), head.column_scale.numel()
        row_scale = torch.empty(rows, device=head.q.device)
        on_gpu = self.tuned is not None
        codes = (int4.memory if on_gpu else self.memory)(rows, columns, head.q.device)
        for part in slices(rows):
            numbers, row_scale[part] = int4.quantise(head.q[index[part], :columns], head.row_scale[index[part]])
            if on_gpu:
                codes[part] = int4.pack(numbers)
            else:
                codes[part, :columns] = numbers
        into.register_buffer("weight_int4" if on_gpu else "weight_int8", codes, persistent=False)
        scale = row_scale if on_gpu else row_scale.to(head.row_scale.dtype)
        into.register_buffer("weight_row_scale", scale, persistent=False)
        into.register_buffer("weight_column_scale", head.column_scale, persistent=False)
        if on_gpu:
            from sparkpin_int8_lm_head import cuda

            cuda.rehearse_int4(codes, row_scale, head.column_scale, self.dtype, self.tuned_int4)

    def choose_kernel(self, dtype: torch.dtype, device: torch.device) -> str:
        """Its name; on a GPU also the tile sizes. Raises ModError where there is none."""
        if device.type != "cuda":
            return "int8pack"
        from sparkpin_int8_lm_head import cuda
        from sparkpin_int8_lm_head.tuned import tuned_for

        if dtype not in cuda.DTYPES:
            raise ModError(
                f"int8-lm-head: the LM head is {dtype}; on a GPU the kernel takes bfloat16 and float16: leave "
                "out --dtype float32 or set SPARKPIN_MOD_INT8_LM_HEAD=0"
            )
        major, minor = torch.cuda.get_device_capability(device)
        self.tuned, self.tuned_int4 = tuned_for(10 * major + minor), tuned_for(10 * major + minor, bits=4)
        return f"triton sm_{major}{minor}"

    def memory(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """``[rows, >= columns]`` int8 zeros, as the kernel wants codes to lie. After `choose_kernel`."""
        if self.tuned is None:
            return torch.zeros(rows, padded(columns), dtype=torch.int8, device=device)
        from sparkpin_int8_lm_head.layout import lay_out

        return lay_out(rows, columns, device)

    def _rehearse(self, layer: torch.nn.Module) -> None:
        from sparkpin_modkit import kernels

        from sparkpin_int8_lm_head.ahead import warm_up

        has_bias = getattr(layer, "bias", None) is not None
        kernels.warm(MOD, lambda: warm_up((self.dtype,), biases=(has_bias,), float32=self.float32))
        self._try(layer)

    def _try(self, layer: torch.nn.Module) -> None:
        from sparkpin_int8_lm_head import cuda

        bias = getattr(layer, "bias", None)
        scales = layer.weight_row_scale, layer.weight_column_scale if self.has_column_scale else None
        assert self.tuned is not None
        cuda.rehearse(layer.weight_int8, *scales, bias, self.dtype, self.tuned, float32=self.float32)


def drafts_are_sampled() -> bool:
    """Whether vLLM keeps a drafter's logits, in memory of the model's type: it wants them in that type, then.

    `draft_sample_method` "probabilistic", with the runner that is the usual one from 0.32 on: its `gumbel_sample`
    asserts it. Target and drafter may be given one head, so both are meant.
    """
    config = get_current_vllm_config_or_none()
    return getattr(config and config.speculative_config, "draft_sample_method", None) == "probabilistic"


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.data.view(torch.int16 if weight.element_size() == 2 else torch.int32)


def mark(layer: torch.nn.Module, twin: torch.nn.Module | None) -> None:
    """What vLLM compares to tell whether a drafter's own head is the target's: one number for each head, so that it is
    equal where the head is. Who takes it for a matrix fails at once.

    vLLM 0.32 and 0.33, v1/worker/gpu/spec_decode/eagle/utils.py, `_should_share`, which DFlash and DSpark call, too.
    """
    layer.weight = torch.tensor([next(_numbers)]) if twin is None else twin.weight


def _of(layer: torch.nn.Module) -> Int8Head:
    head = layer.int8_head
    assert isinstance(head, Int8Head)
    return head

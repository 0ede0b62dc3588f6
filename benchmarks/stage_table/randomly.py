"""Random weights for vLLM's dummy loader, of sizes that keep a network of 48 layers finite."""

from __future__ import annotations

import itertools
from typing import Any

import torch

SPREAD = 0.03
"""Weights are uniform within +-SPREAD: about 1 / sqrt(3072) in the mean square."""


def install() -> None:
    """Into vLLM's dummy loader. INT4 experts are not brought into Marlin's order: random codes have none."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    def repack(weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, **_: Any) -> torch.Tensor:
        return weight.reshape(weight.shape[0], size_k // 16, size_n * (num_bits // 2))

    def permute(s: torch.Tensor, **_: Any) -> torch.Tensor:
        return s.contiguous()

    ops.gptq_marlin_moe_repack = repack
    int_wna16.marlin_moe_permute_scales = permute
    seeds = itertools.count(1)

    def make(param: torch.Tensor, *_: Any, name: str = "", **__: Any) -> None:
        if param.device.type != "meta" and param.numel():
            initialise(param, name, torch.Generator(param.device).manual_seed(next(seeds)))

    for module in (weight_utils, dummy_loader):
        module.initialize_single_dummy_weight = make


def initialise(param: torch.Tensor, name: str, generator: torch.Generator) -> None:
    """INT4 codes and FP8 values at random, scales that bring them to SPREAD, norms of about one."""
    data = param.data
    if not data.dtype.is_floating_point:
        # Zero points of symmetric codes and orders of columns stay unread.
        codes(data, generator) if "qweight" in name else data.zero_()
    elif data.dtype.itemsize == 1:
        bits = data.view(torch.uint8)
        bits.random_(0, 256, generator=generator).bitwise_and_(0xBF)  # magnitudes below 2: mean square about 0.4
    elif "scale" in name:
        low, high = (0.002, 0.005) if data.dtype.itemsize == 2 else (0.03, 0.06)
        data.uniform_(low, high, generator=generator)
    elif data.ndim == 1:
        # Norms: the linear attention's is its weight, all others 1 + weight.
        data.fill_(1.0) if name == "weight" else data.uniform_(-1e-3, 1e-3, generator=generator)
    elif data.ndim == 3 and data.shape[-1] <= 8:
        data.uniform_(-0.5, 0.5, generator=generator)  # the short convolution
    else:
        data.uniform_(-SPREAD, SPREAD, generator=generator)


def codes(data: torch.Tensor, generator: torch.Generator) -> None:
    """Eight of 0 to 15 in each int32, where 8 stands for 0; no code is 0.

    Codes of -8 to 7 have a mean of -1/2: after a few layers all tokens have one direction, and the same experts.
    """
    data.random_(-(2**31), 2**31 - 1, generator=generator)
    some = data >> 1
    some |= data
    some |= data >> 2
    some |= data >> 3
    some.bitwise_and_(0x11111111).bitwise_xor_(0x11111111)  # 1 where all four bits are 0
    data |= some << 3

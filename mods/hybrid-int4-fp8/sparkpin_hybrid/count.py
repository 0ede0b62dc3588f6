"""Counts the layers that were given an FP8 method and those whose weights have arrived, scales and all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sparkpin_modkit import report, reporting_failure
from vllm.config import get_current_vllm_config_or_none

from sparkpin_hybrid import MOD, VERSION

UNSET = torch.finfo(torch.float32).min
"""The scale of a block whose own has not come: vLLM's linear layers begin with it, its experts with 1, a scale."""


class LayerCount:
    """Reports "active" each time every dispatched layer has its weights: once per loaded model that has FP8 layers.

    vLLM builds all layers of a model before it finishes the weights of any, and a drafter after its target.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.loaded = 0

    def watch(self, method: Any, path: str, prefix: str) -> Any:
        """Count `method` as dispatched, and as loaded once its weights are processed; returns `method`.

        Its weights are processed (for a kernel, or expanded) only when each block has a scale from the checkpoint:
        otherwise ValueError, with the layer and the file that should have named it, on any device and path.
        """
        self.dispatched += 1
        create, process, index = method.create_weights, method.process_weights_after_loading, _index()

        def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
            create(layer, *args, **kwargs)
            for _, scale in _scales(layer):
                scale.fill_(UNSET)

        def process_weights_after_loading(layer: Any) -> None:
            with reporting_failure(MOD, version=VERSION):
                for name, scale in _scales(layer):
                    if missing := int(((scale == UNSET) | scale.isnan()).sum()):
                        raise ValueError(
                            f"{prefix}.{name}: the checkpoint left scales unset or NaN, {missing} of {scale.numel()}; "
                            f"expected one for each block of FP8 weights, in the files that {index} names. Make the "
                            "checkpoint again: invoke build --checkpoint-only"
                        )
            process(layer)
            self.loaded += 1
            if self.loaded == self.dispatched:
                report(MOD, "active", version=VERSION, fp8_layers=self.loaded, path=path)

        method.create_weights = create_weights
        method.process_weights_after_loading = process_weights_after_loading
        return method


def _scales(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return (
        (name, one.data) for name, one in layer.named_parameters(recurse=False) if name.endswith("weight_scale_inv")
    )


def _index() -> Path:
    """Of the checkpoint that vLLM is making layers for."""
    config = get_current_vllm_config_or_none()
    model = config.model_config.model if config and config.model_config else ""
    return Path(model, "model.safetensors.index.json")

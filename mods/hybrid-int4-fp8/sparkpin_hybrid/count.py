"""Counts the layers that were given an FP8 method and those whose weights have arrived."""

from __future__ import annotations

from typing import Any

from sparkpin_modkit import report

from sparkpin_hybrid import MOD, VERSION


class LayerCount:
    """Reports "active" each time every dispatched layer has its weights: once per loaded model that has FP8 layers.

    vLLM builds all layers of a model before it finishes the weights of any, and a drafter after its target.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.loaded = 0

    def watch(self, method: Any, path: str) -> Any:
        """Count `method` as dispatched, and as loaded once its weights are processed; returns `method`."""
        self.dispatched += 1
        process = method.process_weights_after_loading

        def process_weights_after_loading(layer: Any) -> None:
            process(layer)
            self.loaded += 1
            if self.loaded == self.dispatched:
                report(MOD, "active", version=VERSION, fp8_layers=self.loaded, path=path)

        method.process_weights_after_loading = process_weights_after_loading
        return method

"""A head whose INT8 form lies in the checkpoint: the step `int8-head` of the project's builder made it.

config.json says so, since vLLM must have room for what comes before it comes. A drafter of another checkpoint, which
has a 16-bit head of its own, does not go with such a head: vLLM says that it has no place for its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sparkpin_modkit import ModError, reporting_failure

from sparkpin_int8_lm_head import MOD, VERSION
from sparkpin_int8_lm_head.method import Int8LMHeadMethod, any_loaded
from sparkpin_int8_lm_head.quantise import Int8Head

SETTING = "sparkpin_int8_lm_head"
FORMAT = 1
NAMES = ("weight_int8", "weight_row_scale", "weight_column_scale")
_REBUILD = "make the checkpoint with the sparkpin that made this image, or serve one without the step `int8-head`"


def is_stored() -> bool:
    """Whether the model that vLLM is making has its head in INT8. Raises ModError for a form that is not known."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    setting = getattr(config.model_config.hf_config, SETTING, None) if config and config.model_config else None
    if setting is not None and setting != {"format": FORMAT}:
        raise ModError(
            f"int8-lm-head: config.json: {SETTING}: saw {setting!r}, wanted {{'format': {FORMAT}}}; {_REBUILD}"
        )
    return setting is not None


class StoredInt8LMHeadMethod(Int8LMHeadMethod):
    """Loads codes and scales. A vocabulary shard loads its rows of them."""

    def make_room(self, layer: torch.nn.Module) -> None:
        """Put parameters for the three tensors in the place of the 16-bit one, which nothing would load.

        Its memory goes last: it is then a piece of its own, which can be given back.
        """
        weight = layer.weight
        rows, columns = weight.shape
        self.dtype = weight.dtype
        self.kernel = self.choose_kernel(weight.dtype, weight.device)
        self.codes = self.memory(rows, columns, weight.device)
        self.loaded: set[str] = set()
        # No number, so that a scale that is not loaded is noticed.
        row_scale = torch.full((rows,), torch.nan, dtype=weight.dtype, device=weight.device)
        column_scale = torch.full((columns,), torch.nan, dtype=weight.dtype, device=weight.device)
        for name, data in zip(NAMES, (self.codes[:, :columns], row_scale, column_scale), strict=True):
            parameter = torch.nn.Parameter(data, requires_grad=False)
            parameter.weight_loader = self._loader(layer, name)  # type: ignore[attr-defined]
            if name != "weight_column_scale":
                parameter.output_dim = 0  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)
        del layer.weight

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        raise ModError(
            "int8-lm-head: config.json: tie_word_embeddings: saw true, wanted false beside a head of its own in INT8; "
            f"{_REBUILD}"
        )

    def is_absent(self, layer: torch.nn.Module) -> bool:
        """As for 16 bits; the codes' memory, which vLLM does not know of, goes too."""
        absent = bool(layer.weight_int8.is_meta)
        if absent:
            del self.codes
        return absent

    def is_unloaded(self, layer: torch.nn.Module) -> bool:
        """Not of the target, which comes before its drafter: that is a checkpoint without a head. Dummy weights come
        without being loaded, and are numbers."""
        return any_loaded() and not self.loaded and bool(layer.weight_row_scale.isnan().all())

    def drop(self, layer: torch.nn.Module) -> None:
        for name in NAMES:
            delattr(layer, name)

    def take(self, layer: torch.nn.Module) -> Int8Head:
        missing = [f"lm_head.{name}" for name in NAMES if name not in self.loaded]
        row_scale, column_scale = layer.weight_row_scale.data, layer.weight_column_scale.data
        finite = bool(torch.isfinite(row_scale).all() and torch.isfinite(column_scale).all())
        if not finite or (missing and self.loaded):  # dummy weights come without being loaded
            seen = f"{', '.join(missing)} missing" if missing else "scales with infinity or NaN"
            raise ModError(f"int8-lm-head: the checkpoint: saw {seen}, wanted an LM head in INT8; {_REBUILD}")
        self.drop(layer)
        return Int8Head(self.codes, row_scale, column_scale)

    def _loader(self, layer: torch.nn.Module, name: str) -> Callable[[Any, torch.Tensor], None]:
        def load(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
            with reporting_failure(MOD, version=VERSION):
                if loaded.dtype != parameter.dtype:
                    raise ModError(
                        f"int8-lm-head: the checkpoint's lm_head.{name} is {loaded.dtype}, wanted {parameter.dtype}, "
                        "the model's type: serve it with the --dtype that the checkpoint was made for"
                    )
                layer.weight_loader(parameter, loaded)
            self.loaded.add(name)

        return load

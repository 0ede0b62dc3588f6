"""The `int8-head` step: the LM head stored in INT8, as the mod int8-lm-head would quantise it at each start.

`lm_head.weight` goes; what takes its place is named so that a vLLM without the mod stops while it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from sparkpin.checkpoint.draft import Draft
from sparkpin.checkpoint.mtp import setting
from sparkpin.checkpoint.repository import CONFIG, Places, TensorPlace
from sparkpin.checkpoint.safetensors import TensorInfo, tensor_nbytes
from sparkpin.core.errors import CheckpointError

STEP = "int8-head"
HEAD = "lm_head.weight"
CODES, ROW_SCALE, COLUMN_SCALE = "lm_head.weight_int8", "lm_head.weight_row_scale", "lm_head.weight_column_scale"
DTYPES = ("BF16", "F16")
SETTING = "sparkpin_int8_lm_head"
"""Of config.json: by it the mod knows what to make room for (mods/int8-lm-head, stored.py)."""

FORMAT = 1
"""Of the three tensors: raise it, there as well, when their meaning or the quantiser's choices change."""

_STAGE = "a stage without the checkpoint step `int8-head`; the mod int8-lm-head then quantises the head while it loads"


def apply_int8_head(draft: Draft) -> None:
    """Put three tensors in the place of the head. Raises CheckpointError for a head that cannot be stored so."""
    base = draft.base
    if setting(draft, "tie_word_embeddings") is True:
        raise CheckpointError(
            f"{base.origin}/{CONFIG}: tie_word_embeddings: saw True, wanted a head of its own: the embedding keeps the "
            "16-bit weights of a tied one, so INT8 beside them would make the checkpoint larger",
            next_step=_STAGE,
        )
    head = base.found.get(HEAD)
    if head is None:
        raise CheckpointError(f"{base.origin}: {HEAD}: saw no such tensor, wanted the LM head", next_step=_STAGE)
    if draft.source(HEAD)[1] is not head or HEAD in draft.dropped.get(head.file, {}):
        raise CheckpointError(
            f"hybrid.rules: lm_head: saw another repository's weights, wanted those of {base.origin}, which the step "
            f"`{STEP}` quantises",
            next_step="`keep` lm_head by a first rule in pins/models/ (docs/checkpoints.md, rules)",
        )
    dtype, shape = head.info.dtype, head.info.shape
    if dtype not in DTYPES or len(shape) != 2 or 0 in shape:
        seen = f"{dtype} {list(shape)}"
        raise CheckpointError(f"{base.origin}: {HEAD}: saw {seen}, wanted a matrix in BF16 or F16", next_step=_STAGE)
    draft.drop(head)
    for name, kind, size in (
        (CODES, "I8", shape),
        (ROW_SCALE, dtype, shape[:1]),
        (COLUMN_SCALE, dtype, shape[1:]),
    ):
        info = TensorInfo(name, kind, size, 0, tensor_nbytes(kind, size))
        draft.add(head.file, TensorPlace(base.name, head.file, info, of=head), listed=HEAD in base.listed)
    draft.config[SETTING] = {"format": FORMAT}


class Computed:
    """The bytes of tensors that are computed from others, of one shard; for one thread."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._parts: dict[TensorPlace, Mapping[str, Callable[[], Iterator[memoryview]]]] = {}

    def chunks(self, source: TensorPlace) -> Iterator[memoryview]:
        """Raises CheckpointError for weights with infinities or NaN."""
        assert source.of
        if source.of not in self._parts:
            self._parts[source.of] = self._quantiser(source.of)
        return self._parts[source.of][source.info.name]()

    def _quantiser(self, head: TensorPlace) -> Mapping[str, Callable[[], Iterator[memoryview]]]:
        from sparkpin.checkpoint.int8_quantiser import Int8Head  # numpy takes a tenth of a second to import

        path, begin = self.places.of(head)
        rows, columns = head.info.shape
        made = Int8Head(path, begin, cast(Any, head.info.dtype), rows, columns)
        return {CODES: made.codes, ROW_SCALE: made.row_scale, COLUMN_SCALE: made.column_scale}

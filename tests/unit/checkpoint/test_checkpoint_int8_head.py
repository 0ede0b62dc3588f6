"""The LM head stored in INT8.

mods/int8-lm-head/tests/test_int8_stored.py compares its bytes with the mod's, in the image.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import (
    ALL,
    RULE,
    Sample,
    listings_of,
    lock_of,
    places_of,
    read_tensors,
)
from places import PROJECT

from sparkpin.checkpoint import int8_quantiser
from sparkpin.checkpoint.int8_head import CODES, COLUMN_SCALE, HEAD, ROW_SCALE, SETTING
from sparkpin.checkpoint.plan import (
    all_steps,
    checkpoint_key,
    checkpoint_steps,
    final_tensors,
    make_plan,
    taken,
)
from sparkpin.checkpoint.safetensors import TensorSource, read_header, write_file
from sparkpin.checkpoint.verify import verify_checkpoint
from sparkpin.core.errors import CheckpointError
from sparkpin.pins.manifests import load_chain

STEPS = (*ALL, "int8-head")
FILE = "model-00002-of-00002.safetensors"
ROWS, COLUMNS = 6, 4
# The third column is eight times as large as its codes; the fourth row is empty; rows have scales 1, 1/2 and 1/4.
INTEGERS = [[127, -3, 40, 64], [-127, 1, 2, -1], [5, 127, -100, 0], [0, 0, 0, 0], [127, 127, 127, 127], [1, -127, 9, 8]]
SCALES = [1.0, 0.5, 0.25, 1.0, 1.0, 1.0]
BY_COLUMN = [1.0, 1.0, 8.0, 1.0]


def bfloat16(values: list[float]) -> bytes:
    """Numbers that are exact in it."""
    raw = b"".join(struct.pack("<f", value)[2:] for value in values)
    assert [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, len(raw), 2)] == values
    return raw


class Model(Sample):
    """The sample base with a head, and what is to be different about it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.base[FILE][HEAD] = ("BF16", (ROWS, COLUMNS))
        self.head: bytes | None = bfloat16(
            [
                code * scale * column
                for codes, scale in zip(INTEGERS, SCALES, strict=True)
                for code, column in zip(codes, BY_COLUMN, strict=True)
            ]
        )

    def folders(self) -> dict[str, Path]:
        folders = super().folders()
        if self.head is not None:
            path = folders["int4"] / FILE
            info = read_header(path).tensors[HEAD]
            data = bytearray(path.read_bytes())
            data[info.begin : info.end] = self.head
            path.write_bytes(data)
        return folders


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def test_small_integers_come_back_exactly_and_index_config_and_record_say_so(model: Model) -> None:
    made = model.build(STEPS)
    tensors = read_tensors(made)
    assert HEAD not in tensors
    codes = bytes(code % 256 for row in INTEGERS for code in row)
    assert tensors[CODES] == (FILE, "I8", (ROWS, COLUMNS), codes)
    assert tensors[ROW_SCALE] == (FILE, "BF16", (ROWS,), bfloat16(SCALES))
    assert tensors[COLUMN_SCALE] == (FILE, "BF16", (COLUMNS,), bfloat16(BY_COLUMN))
    before = {name: tensor for name, tensor in read_tensors(model.root / "int4").items() if "shared" not in name}
    del before[HEAD]
    assert before.items() <= tensors.items(), "another tensor was changed"
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert {name: index["weight_map"].get(name) for name in (HEAD, CODES, ROW_SCALE, COLUMN_SCALE)} == {
        HEAD: None, CODES: FILE, ROW_SCALE: FILE, COLUMN_SCALE: FILE
    }  # fmt: skip
    assert index["metadata"]["total_size"] == sum(len(tensor[3]) for tensor in tensors.values())
    assert json.loads((made / "config.json").read_text())[SETTING] == {"format": 1}
    assert json.loads((made / "sparkpin.json").read_text())["steps"][-1] == {"step": "int8-head"}
    # Will fail if we ever make a change that changes what is stored.
    stored = hashlib.sha256((made / FILE).read_bytes()).hexdigest()
    assert stored == "5b8341ffcd0049cf25743fc11d58f6a6ee30a5bb7a90f6597d5ba7ed814161f8"


def test_the_plan_tells_it(model: Model) -> None:
    plan = model.plan(STEPS)
    (shard,) = (shard for shard in plan.shards if HEAD in shard.dropped)
    assert {CODES, ROW_SCALE, COLUMN_SCALE} <= set(shard.added)
    assert all("lm_head" not in source.info.name for sources in taken(plan).values() for source in sources)
    names = [placed.source.info.name for placed in final_tensors(plan, listings_of(model.folders()))]
    assert {CODES, ROW_SCALE, COLUMN_SCALE} <= set(names) and HEAD not in names


@pytest.mark.parametrize("name", [CODES, ROW_SCALE, COLUMN_SCALE])
def test_verify_computes_it_anew(model: Model, name: str) -> None:
    made, folders = model.build(STEPS), model.folders()
    info = read_header(made / FILE).tensors[name]
    data = bytearray((made / FILE).read_bytes())
    data[info.end - 1] ^= 1
    (made / FILE).chmod(0o644)
    (made / FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"bytes of tensor '{name}' are not those computed anew"):
        verify_checkpoint(made, places_of(folders), make_plan(listings_of(folders), model.pin, STEPS))


def test_weights_that_are_no_numbers_leave_no_checkpoint(model: Model) -> None:
    assert model.head
    model.head = model.head[:-2] + b"\x80\x7f"
    with pytest.raises(CheckpointError, match="NaN or infinity in row 5"):
        model.build(STEPS)
    assert not (model.root / "made").exists()


def head_of_fp8(model: Model) -> None:
    model.fp8["model-00001-of-00002.safetensors"][HEAD] = ("BF16", (ROWS, COLUMNS))
    model.pin_changes["hybrid"] = {"rules": [RULE, {"modules": ["lm_head"], "format": "plain", "source": "fp8"}]}


def head_of(*spec: object) -> Callable[[Model], object]:
    return lambda model: model.base[FILE].update({HEAD: spec})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.configs["int4"]["text_config"].update(tie_word_embeddings=True),
         "tie_word_embeddings: saw True, wanted a head of its own"),
        (lambda model: model.base[FILE].pop(HEAD), r"lm_head\.weight: saw no such tensor, wanted the LM head"),
        *((head_of(kind, shape), rf"saw {kind} .*, wanted a matrix in BF16 or F16")
          for kind, shape in (("F8_E4M3", (6, 8)), ("F32", (6, 2)), ("BF16", (24,)), ("BF16", (0, 4)))),
        (head_of_fp8, r"hybrid\.rules: lm_head: saw another repository's weights"),
    ],
)  # fmt: skip
def test_a_head_that_cannot_be_stored_is_refused(model: Model, change: Callable[[Model], object], said: str) -> None:
    model.head = None
    change(model)
    with pytest.raises(CheckpointError, match=said):
        model.plan(STEPS)


def test_only_a_stage_asks_for_it(model: Model) -> None:
    assert checkpoint_steps(load_chain(PROJECT, "v2-stored"), model.pin) == STEPS
    for stage in ("v2", "v2-tq"):
        assert checkpoint_steps(load_chain(PROJECT, stage), model.pin) == ALL
    assert all_steps(model.pin) == ALL
    pin, lock = model.pin, lock_of(model.folders(), model.pin)
    assert checkpoint_key(pin, lock, STEPS) != checkpoint_key(pin, lock, ALL)
    assert HEAD in {placed.source.info.name for placed in final_tensors(model.plan(ALL), listings_of(model.folders()))}


def test_it_takes_little_memory(tmp_path: Path) -> None:
    rows, columns = 60_000, 256
    part = bfloat16([float((7 * i) % 253 - 126) for i in range(columns)])
    write_file(tmp_path / "head", [TensorSource(HEAD, "BF16", (rows, columns), (part for _ in range(rows)))])
    info = read_header(tmp_path / "head").tensors[HEAD]
    tracemalloc.start()
    try:
        made = int8_quantiser.Int8Head(tmp_path / "head", info.begin, "BF16", rows, columns)
        size = sum(len(chunk) for chunks in (made.column_scale, made.row_scale, made.codes) for chunk in chunks())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size == rows * columns + 2 * (rows + columns)
    assert peak < 0.4 * info.nbytes, "wanted a few copies of 262,144 weights and 4,096 sampled rows"

"""Rules of the hybrid step: which module holds what afterwards, byte for byte, and what cannot be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import safetensors
from checkpoint_samples import ALL, BODY, EXTRA, HYBRID, RULE, Sample, read_tensors

from sparkpin.checkpoint.formats import Patterns
from sparkpin.checkpoint.safetensors import ITEM_SIZE
from sparkpin.checkpoint.steps import checkpoint_key, lock_for, require
from sparkpin.core.errors import CheckpointError, ManifestError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ATTENTION = [f"{BODY}{layer}.self_attn.q_proj" for layer in (0, 1)]
FP8_ENTRY = {"bits": 8, "group_size": [4, 4], "sym": True, "data_type": "fp"}
PLAIN_ENTRY = {"bits": 16, "data_type": "float"}
FP8_ATTENTION = RULE | {"modules": ["model.*.self_attn.q_proj"]}
PLAIN_ATTENTION = {"modules": ["model.*.self_attn.q_proj"], "format": "plain", "source": "bf16"}
KEEP = {"modules": ["*"], "format": "keep"}


class Pair(Sample):
    """The third repository holds plain weights."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.shards["bf16"], self.configs["bf16"] = {FIRST: {}}, {}
        for module in ATTENTION:
            self.fp8[SECOND][f"{module}.weight_scale_inv"] = ("BF16", (2, 2))
            self.shards["bf16"][FIRST][f"{module}.weight"] = ("BF16", (8, 8))

    def with_rules(self, *rules: dict[str, Any]) -> Pair:
        self.pin_changes["hybrid"] = {"rules": list(rules)}
        return self


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def extra_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]["extra_config"]
    return config


def test_fp8_over_int4(pair: Pair) -> None:
    for module, file in zip(ATTENTION, (FIRST, SECOND), strict=True):
        pair.base[file] |= {f"{module}.qzeros": ("I32", (1, 1)), f"{module}.g_idx": ("I32", (8,))}
    before = read_tensors(pair.folders()["int4"])
    made = pair.with_rules(FP8_ATTENTION).build(HYBRID)
    after = read_tensors(made)
    gone = {f"{module}.{part}" for module in ATTENTION for part in ("qweight", "qzeros", "scales", "g_idx")}
    assert set(before) - set(after) == gone
    for module, file in zip(ATTENTION, (FIRST, SECOND), strict=True):
        for part, spec in (("weight", ("F8_E4M3", (8, 8))), ("weight_scale_inv", ("BF16", (2, 2)))):
            name = f"{module}.{part}"
            assert after.pop(name) == (file, *spec, samples.data_of("fp8", name, spec))
    assert after == {name: tensor for name, tensor in before.items() if name not in gone}
    assert extra_config(made) == samples.base_config()["quantization_config"]["extra_config"] | dict.fromkeys(
        ATTENTION, FP8_ENTRY
    )
    weight_map = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert not gone & set(weight_map) and weight_map[f"{ATTENTION[1]}.weight"] == SECOND


def test_plain_over_int4(pair: Pair) -> None:
    made = pair.with_rules(PLAIN_ATTENTION).build(HYBRID)
    after = read_tensors(made)
    for module in ATTENTION:
        spec = ("BF16", (8, 8))
        assert after[f"{module}.weight"][1:] == (*spec, samples.data_of("bf16", f"{module}.weight", spec))
        assert not {f"{module}.qweight", f"{module}.scales", f"{module}.weight_scale_inv"} & set(after)
        assert extra_config(made)[module] == PLAIN_ENTRY


def test_the_first_rule_that_fits_counts(pair: Pair) -> None:
    keep = KEEP | {"modules": [f"{BODY}0.*"]}
    made = pair.with_rules(keep, FP8_ATTENTION).build(HYBRID)
    assert ATTENTION[0] not in extra_config(made) and extra_config(made)[ATTENTION[1]] == FP8_ENTRY
    made = pair.with_rules(KEEP, FP8_ATTENTION, RULE).plan(HYBRID)
    assert (made.shards, made.texts) == ((), ())


@pytest.mark.parametrize("step", ["hybrid", "mtp-fp8"])
def test_mtp_modules_in_fp8(pair: Pair, step: str) -> None:
    """By a rule for every stage, or by those of a step that one stage asks for: the same bytes."""
    names = [f"mtp.layers.0.mlp.shared_expert.{part}_proj" for part in ("down", "gate", "up")]
    for name in names:
        pair.fp8[FIRST] |= {
            f"{name}.weight": ("F8_E4M3", (2, 3)),
            f"{name}.weight_scale_inv": ("F32", (1, 1)),
        }
    rule = RULE | {"modules": ["mtp.layers.0.mlp.shared_expert.*"]}
    own = step == "mtp-fp8"
    pair.with_rules(*([RULE] if own else [RULE, rule]))
    pair.pin_changes["mtp"] = {"file": EXTRA, "tensors": ["mtp.*"], "rules": [rule] if own else []}
    unlisted = json.loads((pair.build(HYBRID) / "model.safetensors.index.json").read_text())["weight_map"]
    assert not any(name.startswith("mtp.") for name in unlisted), "without the mtp step they stay out of the index"
    made = pair.build((*ALL, step) if own else ALL)
    listed = json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    for name in names:
        assert read_tensors(made)[f"{name}.weight"][:2] == (EXTRA, "F8_E4M3")
        assert listed[f"{name}.weight"] == listed[f"{name}.weight_scale_inv"] == EXTRA
        assert extra_config(made)[name] == FP8_ENTRY


def test_a_stage_without_the_step_takes_nothing_of_it(pair: Pair) -> None:
    """What the lock has more of changes no other checkpoint: neither its key nor what is fetched."""
    every, own = "mtp.layers.0.mlp.shared_expert.*", (*ALL, "mtp-fp8")
    names = [every.replace("*", f"{part}_proj") for part in ("down", "gate", "up")]
    for name in names:
        pair.fp8[FIRST] |= {f"{name}.weight": ("F8_E4M3", (2, 3)), f"{name}.weight_scale_inv": ("F32", (1, 1))}
    without, alone = pair.pin, samples.lock_of(pair.folders(), pair.pin)
    pair.pin_changes["mtp"] = {"file": EXTRA, "tensors": ["mtp.*"], "rules": [RULE | {"modules": [every]}]}
    pin, lock = pair.pin, samples.lock_of(pair.folders(), pair.pin)
    more = {one.name for one in lock.repositories["fp8"].tensors} - {
        one.name for one in alone.repositories["fp8"].tensors
    }
    assert more == {f"{name}.{part}" for name in names for part in ("weight", "weight_scale_inv")}
    assert lock_for(pin, lock, ALL).repositories == alone.repositories
    assert lock_for(pin, lock, own) == lock
    assert checkpoint_key(pin, lock, ALL) == checkpoint_key(without, alone, ALL) != checkpoint_key(pin, lock, own)
    with pytest.raises(ManifestError) as caught:
        require(without, own)
    assert caught.value.key == "mtp.rules"
    with pytest.raises(CheckpointError, match="mtp-fp8"):
        require(pin, (*HYBRID, "mtp-fp8"))


def test_awq_packs_along_the_other_side(pair: Pair) -> None:
    pair.configs["int4"]["quantization_config"]["packing_format"] = "auto_round:auto_awq"
    for module, file in zip(ATTENTION, (FIRST, SECOND), strict=True):
        pair.base[file] |= {f"{module}.qweight": ("I32", (8, 1)), f"{module}.scales": ("F16", (1, 8))}
    assert f"{ATTENTION[0]}.weight" in read_tensors(pair.with_rules(FP8_ATTENTION).build(HYBRID))


def test_data_is_aligned_in_long_runs_and_the_reference_reader_reads_it(pair: Pair) -> None:
    """FP8 weights of an odd number of bytes come last; the base's order stays within an item size."""
    made = pair.with_rules(RULE, FP8_ATTENTION).build(HYBRID)
    for file in (FIRST, SECOND):
        header = samples.read_header(made / file)
        infos = list(header.tensors.values())
        assert header.data_start % 8 == 0
        assert all((info.begin - header.data_start) % ITEM_SIZE[info.dtype] == 0 for info in infos)
        published = list(samples.read_header(pair.root / "int4" / file).tensors)
        kept = [info.name for info in infos if info.name in published and not info.name.endswith("proj.weight")]
        assert kept == [name for name in published if name in kept]
        assert [info.dtype for info in infos][-4:] == 4 * ["F8_E4M3"]
        read = dict(safetensors.deserialize((made / file).read_bytes()))
        for name, (_, dtype, shape, data) in read_tensors(made).items():
            if name in read:
                assert bytes(read[name]["data"]) == data
                assert (read[name]["dtype"], tuple(read[name]["shape"])) == (dtype, shape)


def test_the_same_bytes_on_every_machine(pair: Pair) -> None:
    """Changes only if what is written changes: then raise FORMAT, since the keys have to change, too."""
    made = pair.with_rules(RULE, FP8_ATTENTION).build(ALL)
    digest = hashlib.sha256()
    for path in sorted(made.iterdir()):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    assert digest.hexdigest() == "71889c63992bffb4109a810656763fc9562afa6431d1d48de8859d10ed98f809"


def set_spec(pair: Pair, name: str, dtype: str, *shape: int, repository: str = "int4") -> None:
    shards = pair.shards[repository]
    file = next(file for file, tensors in shards.items() if name in tensors)
    shards[file][name] = (dtype, shape)


def spec(name: str, dtype: str, *shape: int, repository: str = "int4") -> Callable[[Pair], None]:
    return lambda pair: set_spec(pair, f"{ATTENTION[0]}.{name}", dtype, *shape, repository=repository)


def setting(key: str, value: object) -> Callable[[Pair], None]:
    return lambda pair: pair.configs["int4"]["quantization_config"].update({key: value})


SCALE = f"{ATTENTION[0]}.weight_scale_inv"
FP8, BF16 = {"repository": "fp8"}, {"repository": "bf16"}


@pytest.mark.parametrize(
    ("change", "rule", "where"),
    [
        (spec("qweight", "I32", 2, 8), FP8_ATTENTION, r"weight: .* \[8, 8\]"),
        (spec("weight", "F8_E5M2", 8, 8, **FP8), FP8_ATTENTION, "weight: .*F8_E5M2"),
        (spec("weight_scale_inv", "BF16", 2, 1, **FP8), FP8_ATTENTION, r"\[2, 2\] for a weight of \[8, 8\]"),
        (lambda pair: pair.base[FIRST].pop(f"{ATTENTION[0]}.scales"), FP8_ATTENTION, r"q_proj\.scales"),
        (setting("bits", 3), FP8_ATTENTION, r"quantization_config\.bits"),
        (lambda pair: pair.configs["fp8"].update(quantization_config="fp8"), FP8_ATTENTION, r"fp8/config\.json"),
        (lambda pair: pair.shards["bf16"][FIRST].update({SCALE: ("BF16", (2, 2))}), PLAIN_ATTENTION, "scale_inv"),
        (spec("weight", "F8_E4M3", 8, 8, **BF16), PLAIN_ATTENTION, "F8_E4M3"),
        (lambda pair: pair.base[FIRST].update({"lm_head.weight": ("BF16", (8, 8))}),
         FP8_ATTENTION | {"modules": ["lm_head"]}, "lm_head"),
        (lambda pair: None, RULE | {"modules": ["model.*.mlp.shared_expert.up_proj"]}, "up_proj and .*gate_proj"),
    ],
)  # fmt: skip
def test_formats_that_do_not_fit_are_refused_at_planning(
    pair: Pair, change: Callable[[Pair], object], rule: dict[str, Any], where: str
) -> None:
    change(pair)
    with pytest.raises(CheckpointError, match=where):
        pair.with_rules(rule).plan(HYBRID)


def with_projections(pair: Pair) -> None:
    for part in ("k_proj", "v_proj"):
        name = f"{BODY}0.self_attn.{part}"
        pair.base[FIRST] |= {f"{name}.qweight": ("I32", (1, 4)), f"{name}.scales": ("F16", (1, 4))}
        pair.fp8[FIRST] |= {
            f"{name}.weight": ("F8_E4M3", (4, 8)),
            f"{name}.weight_scale_inv": ("BF16", (1, 2)),
        }
        pair.shards["bf16"][FIRST][f"{name}.weight"] = ("BF16", (4, 8))
        pair.base[EXTRA][f"mtp.layers.0.self_attn.{part}.weight"] = ("BF16", (4, 8))


def test_parts_of_a_fused_layer_have_one_format(pair: Pair) -> None:
    with_projections(pair)
    message = r"vLLM loads .*q_proj and .*k_proj as one layer, but they would hold fp8 and int4"
    with pytest.raises(CheckpointError, match=message):
        pair.with_rules(FP8_ATTENTION).plan(HYBRID)
    with pytest.raises(CheckpointError, match="as one layer, but they would hold plain and fp8"):
        pair.with_rules(FP8_ATTENTION, PLAIN_ATTENTION | {"modules": ["model.*.self_attn.[kv]_proj"]}).plan(HYBRID)
    tensors = read_tensors(pair.with_rules(RULE | {"modules": ["model.*.self_attn.*_proj"]}).build(HYBRID))
    assert {tensors[f"{BODY}0.self_attn.{part}_proj.weight"][1] for part in "qkv"} == {"F8_E4M3"}


def test_patterns_with_brackets() -> None:
    patterns = Patterns(["a.[kv]_proj", "a.*", "b.[0-9]", "c[d"])
    found = {name: patterns.all(name) for name in ("a.k_proj", "a.q_proj", "b.5", "b.x", "c[d", "d")}
    assert found == {"a.k_proj": [0, 1], "a.q_proj": [1], "b.5": [2], "b.x": [], "c[d": [3], "d": []}

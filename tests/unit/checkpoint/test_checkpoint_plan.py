"""Planning a checkpoint: what fits, what does not, and what decides its key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import ALL, BODY, EXTRA, HYBRID, MODULES, MTP, PIN, RULE, Sample, Shards, listings_of, lock_of
from places import PROJECT

from sparkpin.checkpoint.plan import make_plan
from sparkpin.checkpoint.steps import checkpoint_key, checkpoint_steps
from sparkpin.core.errors import CheckpointError, IntegrityError
from sparkpin.pins import manifests, reading, schema

FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
UP = MODULES[2]


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return Sample(tmp_path)


def test_the_stages_of_the_project_give_the_known_steps() -> None:
    files = sorted((PROJECT / "stages").glob("*.yaml"))
    values = {path.stem: {"name": path.stem, **reading.read_yaml(path), "template": "any.j2"} for path in files}
    stages = {name: reading.parse(schema.Stage, value, name) for name, value in values.items()}

    def chain(name: str | None) -> list[schema.Stage]:
        return [*chain(stages[name].parent), stages[name]] if name else []

    pin = manifests.load_model(PROJECT, "scripted-tiny")
    assert checkpoint_steps(chain("base"), pin) == ("copy",)
    assert checkpoint_steps(chain("mtp"), pin) == ("copy", "hybrid", "mtp")
    assert checkpoint_steps(chain("v2-tq"), pin) == checkpoint_steps(chain("mtp"), pin)
    drafted = pin.with_drafter(manifests.load_model(PROJECT, "scripted-drafter"))
    assert checkpoint_steps(chain("hybrid"), drafted) == ("copy", "hybrid", "drafter")
    with pytest.raises(CheckpointError, match="copy"):
        checkpoint_steps(chain("hybrid")[1:], pin)


def test_hybrid_writes_only_the_shards_that_change(sample: Sample) -> None:
    for module in MODULES[3:]:
        for suffix in (".weight", ".weight_scale_inv"):
            sample.fp8[FIRST].pop(module + suffix, None)
    sample.pin_changes["hybrid"] = {"rules": [RULE | {"modules": [f"{BODY}0.mlp.shared_expert.*"]}]}
    plan = sample.plan(HYBRID)
    assert [shard.path for shard in plan.shards] == [FIRST]
    assert {link.path for link in plan.links} >= {SECOND, EXTRA}
    assert [text.path for text in plan.texts] == ["model.safetensors.index.json", "config.json"]
    assert plan.counts == {"replaced": 3, "added": 3, "listed": 0, "dropped": 0}


def set_spec(shards: Shards, file: str, name: str, dtype: str, *shape: int) -> None:
    assert name in shards[file]
    shards[file][name] = (dtype, shape)


def spec(file: str, name: str, dtype: str, *shape: int) -> Callable[[Sample], None]:
    """Of the FP8 repository."""
    return lambda sample: set_spec(sample.fp8, file, f"{UP}.{name}", dtype, *shape)


def donor(file: str, name: str) -> Callable[[Sample], object]:
    return lambda sample: sample.fp8[file].pop(f"{UP}.{name}")


def quantised_in(size: list[int]) -> Callable[[Sample], None]:
    return lambda sample: sample.configs["fp8"]["quantization_config"].update(weight_block_size=size)


SCALE = "weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "steps", "where"),
    [
        (spec(FIRST, "weight", "F8_E4M3", 5, 6), HYBRID, r" \[5, 6\], .*\[6, 5\]"),
        (donor(FIRST, "weight"), HYBRID, r"fp8: .*up_proj\.weight"),
        (donor(SECOND, SCALE), HYBRID, rf"{UP}\.weight_scale_inv"),
        (lambda sample: sample.configs.update(fp8=None), HYBRID, r"fp8.config\.json"),
        (quantised_in([128, 128]), HYBRID, r"block: .*\[128, 128\]"),
        (lambda sample: sample.pin_changes.update(hybrid={"rules": [RULE, RULE | {"modules": ["*.nothing"]}]}), HYBRID,
         r"'\*\.nothing'"),
        (lambda sample: sample.configs["int4"].pop("quantization_config"), HYBRID, "quantization_config: .*None"),
        (lambda sample: sample.base[SECOND].update({f"{UP}.weight": ("BF16", (6, 5))}), ("copy",),
         f"{UP}.weight' .*{FIRST} .*{SECOND}"),
        (lambda sample: sample.base.pop(EXTRA), ALL, r"'mtp\.\*'"),
        (lambda sample: sample.configs["int4"]["text_config"].update(mtp_num_hidden_layers="1"), ALL,
         "mtp_num_hidden_layers"),
    ],
)  # fmt: skip
def test_repositories_that_do_not_fit_are_refused(
    sample: Sample, change: Callable[[Sample], object], steps: tuple[str, ...], where: str
) -> None:
    change(sample)
    with pytest.raises(CheckpointError, match=where):
        sample.plan(steps)


INDEX = "model.safetensors.index.json"


def indexed(**change: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | change).encode()


def ghost(file: str) -> Callable[[bytes], bytes]:
    return lambda data: indexed(weight_map={**json.loads(data)["weight_map"], "ghost.weight": file})(data)


@pytest.mark.parametrize(
    ("path", "change", "where"),
    [
        (f"fp8/{SECOND}", lambda data: data[:-1], SECOND),
        (f"int4/{INDEX}", ghost(FIRST), r"ghost\.weight"),
        (f"int4/{INDEX}", ghost("gone.safetensors"), r"gone\.safetensors"),
        (f"int4/{INDEX}", indexed(weight_map=["a"]), r"int4/.*\.index\.json: weight_map"),
        (f"int4/{INDEX}", indexed(metadata=["total_size"]), rf"int4/{INDEX}: metadata"),
        ("int4/config.json", lambda _: b'{"a":' + b"[" * 200_000, r"int4/config\.json"),
    ],
)  # fmt: skip
def test_files_that_are_damaged_are_named(
    sample: Sample, path: str, change: Callable[[bytes], bytes], where: str
) -> None:
    listed = sample.folders()
    file = sample.root / path
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises((CheckpointError, IntegrityError), match=where):
        make_plan(listings_of(listed), sample.pin, ALL)


def test_mtp_config_may_stand_at_the_top(sample: Sample) -> None:
    sample.configs["int4"] |= {"text_config": {}, "mtp_num_hidden_layers": 1}
    assert sample.plan(ALL).counts["listed"] == len(MTP)


def test_key_counts_what_decides_the_bytes_and_nothing_else(sample: Sample) -> None:
    folders = sample.folders()
    lock = lock_of(folders)
    key = checkpoint_key(PIN, lock, ALL)
    assert len({checkpoint_key(PIN, lock, steps) for steps in (("copy",), HYBRID, ALL)}) == 3

    renamed = PIN.model_copy(update={"description": "other words"})
    assert checkpoint_key(renamed, lock, ALL) == key
    other_mtp = PIN.model_copy(update={"mtp": schema.MtpStep(file=EXTRA, tensors=["mtp.layers.*"])})
    assert checkpoint_key(other_mtp, lock, HYBRID) == checkpoint_key(PIN, lock, HYBRID)
    assert checkpoint_key(other_mtp, lock, ALL) != key

    for file in ("README.md", EXTRA):
        path = folders["int4"] / file
        before = path.read_bytes()
        path.write_bytes(before[:-1] + b"?")
        assert checkpoint_key(PIN, lock_of(folders), ALL) != key, file
        path.write_bytes(before)


def test_key_counts_of_a_donor_what_is_taken(sample: Sample) -> None:
    lock = lock_of(sample.folders())
    key = checkpoint_key(PIN, lock, ALL)

    def spoil(**change: list[schema.LockedFile]) -> str:
        donor = lock.repositories["fp8"].model_copy(update=change)
        return checkpoint_key(PIN, lock.model_copy(update={"repositories": lock.repositories | {"fp8": donor}}), ALL)

    donor = lock.repositories["fp8"]
    other = schema.LockedFile(name="README.md", file="README.md", size=1, sha256="0" * 64)
    assert spoil(files=[*donor.files, other]) == key
    for part in ("headers", "tensors"):
        rows = getattr(donor, part)
        changed = [rows[0].model_copy(update={"sha256": "0" * 64}), *rows[1:]]
        assert spoil(**{part: changed}) != key, part
    config = next(file for file in donor.files if file.file == "config.json")
    assert spoil(files=[f for f in donor.files if f != config]) != key

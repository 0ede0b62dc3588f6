"""The pins of real models, planned on listings of the published geometry, and the rules that the docs show."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from checkout import PROJECT, Checkout
from checkpoint_samples import base_config, base_shards, write_repository
from qwen_samples import EXTRA, G35B, G122B, MULTIMODAL, TEXT, TOY, Geometry, fp8_listing, int4_listing

from sparkpin.build.pair import pair
from sparkpin.checkpoint.plan import CheckpointPlan, all_steps, make_plan, taken
from sparkpin.checkpoint.repository import Listing, header_of
from sparkpin.core.errors import CheckpointError, ManifestError
from sparkpin.pins import manifests
from sparkpin.pins.schema import UNRESOLVED, HybridStep, ModelPin

PINS = sorted(path.stem for path in (PROJECT / "pins/models").glob("*.yaml"))
LARGE, SMALL, PLAIN = "qwen3.5-122b-a10b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b-nvfp4"
FEW = replace(G122B, experts=2)
PUBLISHED_FP8_BYTES = 127_163_011_832
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", (PROJECT / "docs/checkpoints.md").read_text(), re.DOTALL | re.MULTILINE)


@functools.cache
def listings(g: Geometry, body: str = MULTIMODAL, *, listed: bool = True) -> dict[str, Listing]:
    return {"int4": int4_listing(g, body=body, listed=listed), "fp8": fp8_listing(g, body=body)}


def plan_of(pin: ModelPin, pair: dict[str, Listing]) -> CheckpointPlan:
    return make_plan(pair, pin, all_steps(pin))


def tensors_of(listing: Listing) -> dict[str, str]:
    """name -> file"""
    return {name: file for file in listing.headers for name in header_of(listing, file).tensors}


def counts(plan: CheckpointPlan) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in plan.rows:
        found[row.verb] += row.tensors
    return found


def with_rules(text: str) -> ModelPin:
    step = HybridStep.model_validate(yaml.safe_load(text)["hybrid"])
    return manifests.load_model(PROJECT, LARGE).model_copy(update={"hybrid": step})


@pytest.mark.parametrize("name", PINS)
def test_every_pin_loads(name: str) -> None:
    pin = manifests.load_model(PROJECT, name)
    assert all_steps(pin)[0] == "copy"
    open_ends = [r.repo for r in pin.repositories.values() if r.revision == UNRESOLVED]
    locked = (PROJECT / f"pins/models/{name}.lock").is_file()
    if open_ends and not locked:
        assert f"invoke lock --model {name}" in (PROJECT / f"pins/models/{name}.yaml").read_text()
        with pytest.raises(ManifestError) as caught:
            manifests.load_model_lock(PROJECT, pin)
        assert f"invoke lock --model {name}" in str(caught.value)


def test_pins_without_a_lock_are_no_obstacle_to_other_models() -> None:
    assert {LARGE, SMALL, PLAIN} < set(PINS)
    recipe = manifests.load_recipe(PROJECT, "scripted-tiny")
    assert manifests.model_of(PROJECT, recipe).name == "scripted-tiny"
    assert {one.model.name for one in pair(PROJECT, "scripted-tiny")} == {"scripted-tiny"}


def test_two_pins_of_one_base_are_not_chosen_between_in_silence(project: Path) -> None:
    """A copy with other rules is how people will try other formats."""
    recipe = manifests.load_recipe(project, "scripted-tiny")
    (project / "pins/models/copy.yaml").write_text((project / "pins/models/scripted-tiny.yaml").read_text())
    with pytest.raises(ManifestError, match="of one model of pins/models/, not of copy and scripted-tiny") as caught:
        manifests.model_of(project, recipe)
    assert "move one of these pins out" in caught.value.next_step


def test_the_made_up_pair_has_the_published_counts_and_sizes() -> None:
    """The sums that docs/checkpoints.md shows. Sharp: a wrong dtype of the scales alone is worth 15 MB."""
    int4, fp8 = listings(G122B)["int4"], listings(G122B)["fp8"]
    files = tensors_of(int4)
    assert len(files) == 112_901
    assert sum(file == EXTRA for file in files.values()) == sum(name.startswith("mtp.") for name in files) == 785
    assert int4.files[EXTRA] == 5_047_454_456
    size = sum(size for file, size in fp8.files.items() if file.endswith(".safetensors"))
    assert size == 127_163_083_888
    assert abs(size - PUBLISHED_FP8_BYTES) < 100_000


def test_the_published_408_by_name() -> None:
    """Counted as the script did that published it: what is not taken, and what its shards had no tensor for."""
    shards = {name for name, file in tensors_of(listings(G122B)["int4"]).items() if file != EXTRA}
    placed = shards | {f"{name}_scale_inv" for name in shards}
    unused = [n for n in tensors_of(listings(G122B)["fp8"]) if ".experts." not in n and n not in placed]
    parts = Counter("mtp" if n.startswith("mtp.") else n.split(".")[4] for n in unused)
    assert parts == {"linear_attn": 36 * 8, "self_attn": 12 * 8, "mtp": 24}
    pinned = manifests.load_model(PROJECT, LARGE).hybrid
    assert pinned and len(unused) == pinned.unused == 408


def test_the_plan_of_the_122b_pair() -> None:
    plan = plan_of(manifests.load_model(PROJECT, LARGE), listings(G122B))
    seen = counts(plan)
    assert (seen["replaced"], seen["added"], seen["dropped"], seen["listed"]) == (144, 144, 0, 0)
    assert seen["kept"] == 112_901 - 144
    assert "408 tensors outside of experts stay unused, as the pin expects" in plan.notes
    sources = taken(plan)["fp8"]
    assert (len(sources), sum(source.info.nbytes for source in sources)) == (288, 453_040_128)
    assert len(plan.shards) == 14
    assert EXTRA in [link.path for link in plan.links]


def test_a_revision_with_other_formats_is_told() -> None:
    """As one public script reports of a later copy: in_proj_a and in_proj_b in 16 bits."""
    pin = manifests.load_model(PROJECT, LARGE)
    pair = {"int4": int4_listing(FEW, plain_ab=True), "fp8": listings(FEW)["fp8"]}
    assert "336 tensors outside of experts stay unused, where hybrid.unused of the pin expects 408" in "\n".join(
        plan_of(pin, pair).notes
    )


def test_an_index_without_the_mtp_tensors_gets_them() -> None:
    plan = plan_of(manifests.load_model(PROJECT, LARGE), listings(FEW, listed=False))
    assert counts(plan)["listed"] == 17 + 3 * FEW.experts
    assert plan.unlisted == frozenset()


def test_the_plan_of_the_35b_pair() -> None:
    seen = counts(plan_of(manifests.load_model(PROJECT, SMALL), listings(replace(G35B, experts=2))))
    assert (seen["replaced"], seen["added"], seen["dropped"]) == (120, 120, 0)


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_patterns_fit_the_names_of_text_only_copies(name: str) -> None:
    pin = manifests.load_model(PROJECT, name)
    for body in (MULTIMODAL, TEXT):
        plan = plan_of(pin, listings(TOY, body))
        assert counts(plan)["replaced"] == 3 * TOY.layers
        assert f"{body}layers.0.mlp.shared_expert.up_proj" in plan.config["quantization_config"]["extra_config"]


def test_a_plain_model_has_only_the_first_step() -> None:
    pin = manifests.load_model(PROJECT, PLAIN)
    assert all_steps(pin) == ("copy",)
    plan = make_plan({"nvfp4": listings(TOY)["int4"]}, pin, ("copy",))
    assert (plan.shards, plan.texts, counts(plan).keys()) == ((), (), {"kept"})
    for step in ("hybrid", "mtp"):
        with pytest.raises(ManifestError, match=rf"pins/models/{re.escape(PLAIN)}\.yaml: {step}: saw '\(missing\)'"):
            make_plan({"nvfp4": listings(TOY)["int4"]}, pin, ("copy", step))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """With a plain model from a folder of this machine in the place of the NVFP4 one, and caches of its own."""
    checkout = Checkout.make(tmp_path / "project")
    monkeypatch.setenv("SPARKPIN_CACHE", str(tmp_path / "cache"))
    folder = write_repository(tmp_path / "mine", base_shards(), base_config(), repository="int4")
    repo = "repo: txn545/Qwen3.5-122B-A10B-NVFP4"
    checkout.replace(f"pins/models/{PLAIN}.yaml", repo, f"{repo}\n    folder: {folder}")
    return checkout


def test_tasks_with_a_plain_model(checkout: Checkout) -> None:
    asked = ("checkpoint", "--model", PLAIN)
    unlocked = checkout.invoke(*asked, "--stage", "base", "--dry-run")
    assert unlocked.returncode != 0
    assert f"invoke lock --model {PLAIN}" in unlocked.stderr
    for stage in ("hybrid", "mtp", "v2"):
        impossible = checkout.invoke(*asked, "--stage", stage, "--dry-run")
        assert impossible.returncode != 0
        assert f"pins/models/{PLAIN}.yaml: hybrid: saw '(missing)'" in impossible.stderr
        assert "a plain model, served as published" in impossible.stderr and "--stage base" in impossible.stderr
    checkout.done("lock", "--model", PLAIN)
    held = sum(map(len, base_shards().values()))
    planned = checkout.done(*asked, "--stage", "base", "--dry-run")
    assert f"checkpoint of {PLAIN}, copy: 0 replaced, 0 added, 0 listed, 0 dropped, {held} kept, 0 unused" in planned
    folder = Path(checkout.done(*asked, "--stage", "base").split()[-1])
    assert (folder / EXTRA).samefile(checkout.folder.parent / "mine" / EXTRA)


def test_the_rules_that_the_docs_show() -> None:
    shared, attention, mtp = (plan_of(with_rules(text), listings(FEW)) for text in EXAMPLES)
    assert counts(shared) == counts(plan_of(manifests.load_model(PROJECT, LARGE), listings(FEW)))
    linear, full = 36 * 3, 11 * 4
    seen = counts(attention)
    assert (seen["replaced"], seen["added"]) == (144, 144 + 2 * (linear + full))
    assert seen["dropped"] == 3 * (linear + full)
    extra = attention.config["quantization_config"]["extra_config"]
    layers = "model.language_model.layers"
    assert extra[f"{layers}.3.self_attn.q_proj"] == extra[f"{layers}.0.linear_attn.in_proj_z"]
    assert f"{layers}.47.self_attn.q_proj" not in extra
    assert f"{layers}.0.linear_attn.in_proj_a" not in extra
    assert counts(mtp)["replaced"] == counts(mtp)["added"] == 144 + 7 + 3 * FEW.experts
    assert [link.path for link in mtp.links if link.path.endswith(".safetensors")] == []
    extra = mtp.config["quantization_config"]["extra_config"]
    for module in ("self_attn.o_proj", "mlp.shared_expert.up_proj", "mlp.experts.1.down_proj"):
        assert extra[f"mtp.layers.0.{module}"] == {"bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp"}


def test_half_of_a_fused_layer_is_refused() -> None:
    text = re.sub(r"modules: .*", 'modules: ["model.*.self_attn.q_proj"]', EXAMPLES[0])
    with pytest.raises(CheckpointError, match=r"q_proj and \S+k_proj as one layer, but they would hold fp8 and int4"):
        plan_of(with_rules(text), listings(TOY))


def test_the_122b_head_in_int8_takes_half_of_its_bytes() -> None:
    """The figures that docs/checkpoints.md gives; experts do not count here."""
    plan = make_plan(listings(FEW), manifests.load_model(PROJECT, LARGE), ("copy", "hybrid", "mtp", "int8-head"))
    rows = {row.pattern: (row.verb, row.before, row.after) for row in plan.rows if row.pattern.startswith("lm_head.")}
    assert rows == {
        "lm_head.weight": ("dropped", 1_525_678_080, 0),
        "lm_head.weight_int8": ("added", 0, 762_839_040),
        "lm_head.weight_row_scale": ("added", 0, 496_640),
        "lm_head.weight_column_scale": ("added", 0, 6_144),
    }

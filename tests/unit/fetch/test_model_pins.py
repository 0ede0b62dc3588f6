"""The pins of real models, planned on listings of the published geometry, and the rules that the docs show."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from checkout import PROJECT
from qwen_samples import (
    G122B,
    MULTIMODAL,
    TEXT,
    TOY,
    listings,
    plan_of,
)

from sparkpin.checkpoint.plan import make_plan
from sparkpin.checkpoint.steps import all_steps
from sparkpin.core.errors import ManifestError
from sparkpin.pins import manifests
from sparkpin.pins.schema import ModelPin

PINS = sorted(path.stem for path in (PROJECT / "pins/models").glob("*.yaml"))
LARGE, SMALL, PLAIN = "qwen3.5-122b-a10b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b-nvfp4"
FEW = replace(G122B, experts=2)
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", (PROJECT / "docs/checkpoints.md").read_text(), re.DOTALL | re.MULTILINE)


def with_rules(text: str) -> ModelPin:
    """Those of the page in the place of the pin's own."""
    pin, value = manifests.load_model(PROJECT, LARGE), yaml.safe_load(text)
    return ModelPin.model_validate(pin.model_dump() | value)


@pytest.mark.parametrize("name", PINS)
def test_every_pin_loads(name: str) -> None:
    pin = manifests.load_model(PROJECT, name)
    assert all_steps(pin)[0] == "copy"
    if not (PROJECT / f"pins/models/{name}.lock").is_file():
        with pytest.raises(ManifestError, match=f"models/{name}.lock"):
            manifests.load_model_lock(PROJECT, pin)


def test_two_pins_of_one_base_are_not_chosen_between_in_silence(project: Path) -> None:
    """A copy with other rules is how people will try other formats."""
    recipe = manifests.load_recipe(project, "scripted-tiny")
    (project / "pins/models/copy.yaml").write_text((project / "pins/models/scripted-tiny.yaml").read_text())
    with pytest.raises(ManifestError, match=r"of copy, .* of scripted-tiny"):
        manifests.model_of(project, recipe)


@pytest.mark.parametrize("name", [LARGE, SMALL])
def test_patterns_fit_the_names_of_text_only_copies(name: str) -> None:
    pin = manifests.load_model(PROJECT, name)
    for body in (MULTIMODAL, TEXT):
        plan = plan_of(pin, listings(TOY, body))
        assert plan.counts["replaced"] == 3 * TOY.layers
        assert f"{body}layers.0.mlp.shared_expert.up_proj" in plan.config["quantization_config"]["extra_config"]


def test_a_plain_model_has_only_the_first_step() -> None:
    pin = manifests.load_model(PROJECT, PLAIN)
    assert all_steps(pin) == ("copy",)
    plan = make_plan({"nvfp4": listings(TOY)["int4"]}, pin, ("copy",))
    assert (plan.shards, plan.texts) == ((), ())
    for step in ("hybrid", "mtp"):
        with pytest.raises(ManifestError, match=rf"pins/models/{re.escape(PLAIN)}\.yaml: {step}"):
            make_plan({"nvfp4": listings(TOY)["int4"]}, pin, ("copy", step))


def test_the_rules_that_the_docs_show() -> None:
    shared, attention = (plan_of(with_rules(text), listings(FEW)) for text in EXAMPLES[:2])
    mtp = make_plan(listings(FEW), with_rules(EXAMPLES[2]), ("copy", "hybrid", "mtp", "mtp-fp8"))
    assert shared.counts == plan_of(manifests.load_model(PROJECT, LARGE), listings(FEW)).counts
    linear, full = 36 * 3, 11 * 4
    seen = attention.counts
    assert (seen["replaced"], seen["added"]) == (144, 144 + 2 * (linear + full))
    assert seen["dropped"] == 3 * (linear + full)
    extra = attention.config["quantization_config"]["extra_config"]
    layers = "model.language_model.layers"
    assert extra[f"{layers}.3.self_attn.q_proj"] == extra[f"{layers}.0.linear_attn.in_proj_z"]
    assert f"{layers}.47.self_attn.q_proj" not in extra
    assert f"{layers}.0.linear_attn.in_proj_a" not in extra
    assert mtp.counts["replaced"] == mtp.counts["added"] == 144 + 7 + 3 * FEW.experts
    assert [link.path for link in mtp.links if link.path.endswith(".safetensors")] == []
    extra = mtp.config["quantization_config"]["extra_config"]
    for module in ("self_attn.o_proj", "mlp.shared_expert.up_proj", "mlp.experts.1.down_proj"):
        assert extra[f"mtp.layers.0.{module}"] == {"bits": 8, "group_size": [128, 128], "sym": True, "data_type": "fp"}

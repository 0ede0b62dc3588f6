"""A recipe's second model: what its command must say of it, and which models go together."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from checkout import PROJECT
from packaging.version import Version

from sparkpin.core.errors import ManifestError
from sparkpin.pins import drafters, manifests
from sparkpin.pins.schema import DRAFT_METHODS, Drafts, Recipe
from sparkpin.pins.vllm_command import own_argv, split
from sparkpin.pins.vllm_flags import Flags, flag_value

DATA = PROJECT / "src/sparkpin/recipes/vllm"
PLAN = {"method": "dflash", "model": drafters.PATH, "num_speculative_tokens": 12}
JOINED = {"method": "draft_model", "use_heterogeneous_vocab": True}  # by vLLM itself
TARGET = {"text_config": {"vocab_size": 1000, "hidden_size": 64}}
DRAFTER = TARGET["text_config"]


def recipe(**changes: Any) -> Recipe:
    return manifests.load_recipe(PROJECT, "scripted-drafted").model_copy(update=changes)


def test_a_container_has_the_drafter_beside_the_model_s_own_files() -> None:
    plan = json.loads(flag_value(own_argv(recipe()), drafters.FLAG) or "")
    assert plan == {"method": "draft_model", "model": "/model/drafter", "num_speculative_tokens": 3}
    mounted = recipe(command=recipe().command.replace("sparkpin/scripted-drafter", "/model/drafter"))
    assert own_argv(mounted) == own_argv(recipe())


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("sparkpin/scripted-drafter", "somebody/else", "model"),
        (', "num_speculative_tokens": 3', "", "num_speculative_tokens"),
        (": 3}}", ": 0}}", "num_speculative_tokens"),
    ],
)
def test_a_command_that_names_no_pinned_drafter_is_refused(old: str, new: str, key: str) -> None:
    with pytest.raises(ManifestError) as caught:
        own_argv(recipe(command=recipe().command.replace(old, new)))
    assert caught.value.key.endswith(key) and caught.value.file == "recipes/scripted-drafted.yaml"


def test_a_method_or_number_that_is_not_the_drafter_s_is_refused() -> None:
    drafts = Drafts(method="dflash", tokens=15, acceptance_floor=0.1)
    assert list(drafters.method_faults(PLAN, drafts, "f")) == []
    faults = drafters.method_faults(PLAN | {"method": "eagle3", "num_speculative_tokens": 16}, drafts, "f")
    assert [fault.key.split()[-1] for fault in faults] == ["method", "num_speculative_tokens"]


@pytest.mark.parametrize(
    ("plan", "changes", "key"),
    [
        (JOINED, {"hidden_size": 8}, ""),
        (JOINED, {"vocab_size": 9, "target_hidden_size": 64}, ""),
        ({}, {"vocab_size": 999}, "vocab_size"),
        ({}, {"hidden_size": 128}, "hidden_size"),
        ({}, {"target_hidden_size": 128}, "hidden_size"),
    ],
)
def test_models_that_do_not_go_together_are_refused(plan: dict[str, Any], changes: dict[str, Any], key: str) -> None:
    assert list(drafters.pair_faults(PLAN, TARGET, DRAFTER, "f")) == []
    faults = list(drafters.pair_faults(PLAN | plan, TARGET, DRAFTER | changes, "f"))
    assert [fault.key.endswith(key) for fault in faults] == [True] * bool(key)


@pytest.mark.parametrize(
    ("repo", "config", "method", "longest"),
    [
        ("z-lab/Qwen3.8-27B-DFlash2", {"architectures": ["DFlash2DraftModel"], "block_size": 8}, "dflash", 7),
        ("a/b", {"architectures": ["DFlashDraftModel"], "dflash_config": {"block_size": 16}}, "dflash", 15),
        ("deepseek-ai/dspark_qwen3_8b_block7", {"block_size": 7}, "dspark", 7),
        ("AngelSlim/Qwen3-8B_eagle3", {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3", None),
        ("mistralai/Mistral-Small-4-119B-2603-eagle", {}, "eagle", None),
        ("google/gemma-4-E4B-it-assistant", {"model_type": "gemma4_assistant"}, "mtp", None),
        ("Qwen/Qwen3-0.6B", {"architectures": ["Qwen3ForCausalLM"], "block_size": 9}, "draft_model", None),
    ],
)
def test_how_a_model_drafts_follows_from_its_name_and_config(
    repo: str, config: dict[str, Any], method: str, longest: int | None
) -> None:
    assert drafters.method_of({}, repo, config) == method
    assert drafters.longest_draft(method, config) == longest
    assert drafters.method_of({"method": "gemma4_mtp"}, repo, config) == "mtp", "the recipe's word goes first"


def test_an_assistant_says_the_width_of_the_model_that_it_drafts_for() -> None:
    plan, small = {"method": "mtp"}, {"text_config": {"vocab_size": 1000, "hidden_size": 8}, "backbone_hidden_size": 64}
    assert list(drafters.pair_faults(plan, TARGET, small, "f")) == []
    assert len(list(drafters.pair_faults(plan, TARGET, small | {"backbone_hidden_size": 65}, "f"))) == 1


def plan_of(**plan: object) -> str:
    text = json.dumps({"num_speculative_tokens": 2} | plan)
    return "--speculative-config '" + text.replace("{", "{{").replace("}", "}}") + "'"


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (plan_of(method="mtp"), ""),
        (plan_of(method="suffix"), ""),
        (plan_of(method="mtp", model="other/repo"), "model"),
        (plan_of(method="eagle3", model="suffix"), "model"),
        ("--spec_model=other/repo", "command, --spec-model"),
    ],
)
def test_without_a_drafter_no_model_is_named_but_vllm_s_own(flags: str, key: str) -> None:
    alone = manifests.load_recipe(PROJECT, "scripted-tiny")
    command = alone.command.rstrip() + " " + flags
    with pytest.raises(ManifestError) if key else contextlib.nullcontext() as caught:
        drafters.require_pinned(split(command.format(**alone.defaults), "f"), alone)
    assert not caught or caught.value.key.endswith(key)


def test_each_method_is_known_to_the_stacks_vllm() -> None:
    for file in DATA.glob("*.json"):
        data = json.loads(file.read_text())
        known = next(part["literal"] for part in data["configs"]["SpeculativeConfig"]["method"] if "literal" in part)
        assert ("--spec-model" in data["flags"]) == (Version(file.stem) >= Version("0.32")), file.stem
        assert set(get_args(DRAFT_METHODS)) <= set(known), file.stem


def test_a_part_of_a_flag_is_read_as_json_where_it_can_be() -> None:
    """As vLLM 0.33 reads it: utils/argparse_utils.py."""
    for text, value in (("[[1, 8, 2]]", [[1, 8, 2]]), ("mtp", "mtp"), ("[" * 100_000, "[" * 100_000)):
        words = ["vllm", "serve", "/model", f"{drafters.FLAG}.{drafters.TOKENS}", text]
        assert drafters.speculation(words) == {drafters.TOKENS: value}


@pytest.mark.parametrize("config", ['{"num-speculative-tokens": 3}', "", None])
def test_dashes_in_keys_are_changed_where_vllm_changes_them(config: str | None) -> None:
    """vLLM 0.32 and 0.33, engine/arg_utils.py: in the keys of --speculative-config, whichever way they are given."""
    part = [f"{drafters.FLAG}.num{'_' if config is None else '-'}speculative-tokens", "3"]
    words = [drafters.FLAG, config] if config else part
    assert drafters.speculation(["vllm", "serve", "/model", *words]) == {drafters.TOKENS: 3}
    other = ["vllm", "serve", "/model", "--additional-config.a-b_c", "3"]
    assert Flags(other, "f", {}).json("--additional-config") == {"a-b_c": 3}


def test_a_drafter_s_pin_says_what_it_drafts(tmp_path: Path) -> None:
    (tmp_path / "pins/models").mkdir(parents=True)
    for name in ("scripted-tiny.yaml", "scripted-tiny.lock", "scripted-drafter.yaml", "scripted-drafter.lock"):
        shutil.copy(PROJECT / "pins/models" / name, tmp_path / "pins/models")
    assert manifests.model_of(tmp_path, recipe()).drafter is not None
    assert manifests.unlocked(tmp_path, manifests.model_of(tmp_path, recipe())) == []
    for key, wrong in (
        ("drafter", {"drafter": "x/y"}),
        ("drafter_revision", {"drafter_revision": "0" * 40}),
        ("drafts", {"drafter": recipe().model, "drafter_revision": "unresolved"}),
    ):
        with pytest.raises(ManifestError) as caught:
            manifests.model_of(tmp_path, recipe(**wrong))
        assert caught.value.key == key
    (tmp_path / "pins/models/scripted-drafter.lock").unlink()
    assert manifests.unlocked(tmp_path, manifests.model_of(tmp_path, recipe())) == ["scripted-drafter"]

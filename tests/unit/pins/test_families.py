"""What is chosen for a model and a vLLM where no file says it."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import PROJECT

from sparkpin.build.pair import pair
from sparkpin.core.errors import ManifestError
from sparkpin.pins import manifests
from sparkpin.pins.vllm_command import choices, completed, family_of
from sparkpin.pins.vllm_flags import flag_value
from sparkpin.recipes.vllm_parser import parser_of

BARE = ["vllm", "serve", "/model"]
FAMILIES = manifests.load_families(PROJECT)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Intel/Qwen3.5-122B-A10B-int4-AutoRound", "qwen3.5"),
        ("Qwen/Qwen3-Coder-Next", "qwen3-coder"),
        ("google/diffusiongemma-26B-A4B-it", "gemma-4"),
        ("google/gemma-3-1b-it", "gemma-3-text"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-instruct"),
        ("deepseek-ai/DeepSeek-V4.1-Flash", "deepseek-v4.1"),
        ("mistralai/Ministral-3-8B-Reasoning-2512", "mistral-reasoning"),
        ("mistralai/Ministral-3-14B-Instruct-2512", "mistral"),
        ("someone/a-model-of-its-own", None),
    ],
)
def test_the_family_of_a_model(model: str, name: str | None) -> None:
    family = family_of(FAMILIES, model)
    assert (family.name if family else None) == name


def test_each_family_has_evidence_and_its_own_patterns() -> None:
    patterns = [pattern for family in FAMILIES for pattern in family.models if family.evidence]
    assert len(patterns) == len({*patterns}) == sum(len(family.models) for family in FAMILIES)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_each_parser_that_is_chosen_is_one_of_that_vllm(version: str) -> None:
    """vLLM refuses to start with a parser it does not know, and with automatic tool calls without one."""
    parser = parser_of(version)
    for family in FAMILIES:
        argv = completed(BARE, choices(family, version, BARE))
        for flag in ("--tool-call-parser", "--reasoning-parser", "--tokenizer-mode"):
            assert flag_value(argv, flag) in (None, *parser.flags[flag]["known"]), family.name
        assert ("--enable-auto-tool-choice" in argv) == ("--tool-call-parser" in argv), family.name


def test_a_parser_that_an_older_vllm_lacks_is_not_chosen() -> None:
    family = family_of(FAMILIES, "sparkarena/MiniMax-M3")
    assert choices(family, "0.20.2", BARE) == choices(family, "", BARE) == ()  # a stack may pin no vLLM
    assert flag_value(completed(BARE, choices(family, "0.33.0", BARE)), "--tool-call-parser") == "minimax_m3"


@pytest.mark.parametrize("words", ["--tool_call_parser qwen3_xml", "--chat-template-content-format string"])
def test_what_is_said_stays(words: str) -> None:
    argv = [*BARE, *words.split()]
    chosen = choices(family_of(FAMILIES, "Qwen/Qwen3.5-27B"), "0.33.0", argv)
    assert len(chosen) == 3
    assert completed(argv, chosen)[: len(argv)] == argv


def test_it_comes_into_the_release_with_its_reason(project: Path) -> None:
    """In the place of a recipe that says nothing of parsers; and the file is among what the release was made from."""
    recipe = project / "recipes/scripted-tiny.yaml"
    said = recipe.read_text()
    before = pair(project, "scripted-tiny")[-1]
    assert before.chosen == ()
    recipe.write_text(said[: said.index(" \\\n    --reasoning-parser")] + "\n")
    after = pair(project, "scripted-tiny")[-1]
    assert [(choice.flag, flag_value(after.argv, choice.flag)) for choice in after.chosen] == [
        ("--reasoning-parser", "qwen3"),
        ("--enable-auto-tool-choice", None),
        ("--tool-call-parser", "qwen3_coder"),
    ]
    assert "pins/families.yaml" in after.inputs


def test_a_stack_without_vllm_is_within_no_bounds() -> None:
    family = next(family for family in FAMILIES if any(choice.vllm for choice in family.serve))
    free = {choice.flag for choice in family.serve if not choice.vllm}
    assert {choice.flag for choice in choices(family, "", BARE)} == free


def test_bounds_that_are_none_are_refused(project: Path) -> None:
    file = project / "pins/families.yaml"
    file.write_text(file.read_text().replace('vllm: ">=0.24"', "vllm: before 0.24", 1))
    with pytest.raises(ManifestError, match=r"families\.0\.serve\.2\.vllm"):
        manifests.load_families(project)

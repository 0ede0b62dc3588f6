"""What may stand in a command and its environment, wherever it comes from: recipe, stack, stage, their recipe."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bad_values import ENV, FINE_ENV, FINE_WORDS, FLAGS, SECRETS, WORDS
from checkout import PROJECT
from made_recipes import recipe, stack, stage

from sparkpin.build.pair import pair
from sparkpin.core.errors import ManifestError
from sparkpin.pins import manifests, vllm_command
from sparkpin.pins.values import BETTER, MOD, STAGE, UNSHOWN, lacks_mod, value_faults
from sparkpin.pins.vllm_flags import CACHE_TYPE

sys.path.append(str(PROJECT / "mods/turboquant"))

from sparkpin_turboquant import formats

FLAG_WORDS = [[name, *([value] if value else [])] for name, value in FLAGS.items()]


@pytest.mark.parametrize("words", [*([word] for word in WORDS.values()), *FLAG_WORDS], ids=repr)
def test_words_that_are_refused(words: list[str]) -> None:
    for argv in (words, ["vllm", *words, "--more"]):
        faults = list(value_faults(argv, {}, "r.yaml"))
        assert [fault.key for fault in faults] == ["command"] and faults[0].next_step
        assert not [secret for secret in SECRETS if secret in str(faults[0])]


@pytest.mark.parametrize("name", ENV)
def test_variables_that_are_refused(name: str) -> None:
    faults = list(value_faults([], {name: ENV[name]}, "r.yaml"))
    assert faults and all(fault.key in ("env", f"env.{name}") for fault in faults)
    assert not [secret for secret in SECRETS if secret in str(faults)]


def test_what_only_looks_odd_is_taken() -> None:
    assert not list(value_faults(FINE_WORDS, FINE_ENV, "r.yaml"))


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("recipes/r.yaml", {"recipe": recipe("vllm serve a/b --x {key}", defaults={"key": "'a\nb'"})}),
        ("pins/stacks/cpu.yaml", {"stack": stack(flags={"--x": {"a": "hf_" + "a" * 34}})}),
        ("stages/s.yaml", {"stage": stage(flags={"--api-key": "x"})}),
    ],
)
def test_the_file_that_has_it_is_named(file: str, parts: dict[str, object]) -> None:
    made = {"recipe": recipe(), "stack": stack(), "stage": stage()} | parts
    with pytest.raises(ManifestError) as caught:
        vllm_command.serve_argv(made["recipe"], made["stack"], (made["stage"],))  # type: ignore[arg-type]
    assert caught.value.file == file


def test_a_secret_anywhere_in_a_file_that_goes_into_bundles_or_images(project: Path) -> None:
    path = project / "recipes/scripted-tiny.yaml"
    path.write_text(f"{path.read_text()}# my key: sk-{'a' * 40}\n")
    with pytest.raises(ManifestError) as caught:
        pair(project, "scripted-tiny")
    assert (caught.value.file, caught.value.got) == ("recipes/scripted-tiny.yaml", UNSHOWN)
    path = project / "pins/stacks/cpu.yaml"
    path.write_text(f"{path.read_text()}\nimage:\n  env:\n    PIP_PASSWORD: x\n")
    with pytest.raises(ManifestError) as caught:
        manifests.load_stack(project, "cpu")
    assert caught.value.key == "env.PIP_PASSWORD"


@pytest.mark.parametrize("name", BETTER)
def test_a_cache_type_of_a_patched_vllm_is_refused_with_the_better_choice(name: str) -> None:
    (fault,) = value_faults(["vllm", "serve", "m", f"--kv_cache_dtype={name}"], {}, "r.yaml")
    assert (fault.key, fault.got) == (CACHE_TYPE, name) and BETTER[name] in fault.expected
    assert BETTER[name] in formats.FORMATS


def test_a_stage_whose_image_has_no_kernels_for_the_cache_is_reported() -> None:
    below, own = (manifests.load_chain(PROJECT, name) for name in ("v2", STAGE))
    assert own[-1].mods == [MOD] and own[-1].serve.flags[CACHE_TYPE] in formats.FORMATS
    kinds = (None, "auto", "fp8", *formats.FORMATS)
    assert [kind for kind in kinds if lacks_mod(kind, below)] == [*formats.FORMATS]
    assert not [kind for kind in kinds if lacks_mod(kind, own)]
    assert not list(value_faults([word for kind in kinds[1:] for word in (CACHE_TYPE, str(kind))], {}, "r.yaml"))

"""A recipe of the seeds names a cache type that only a patched vLLM knew."""

from __future__ import annotations

import sys

import pytest
from checkout import PROJECT

from sparkpin.core.errors import ManifestError
from sparkpin.pins import manifests, vllm_command
from sparkpin.pins.values import BETTER, MOD, STAGE
from sparkpin.pins.values import lacks_mod as without_mod
from sparkpin.pins.vllm_flags import CACHE_TYPE as FLAG

sys.path.append(str(PROJECT / "mods/turboquant"))

from sparkpin_turboquant import formats


@pytest.mark.parametrize("name", BETTER)
def test_it_is_refused_with_the_better_choice(name: str) -> None:
    recipe = manifests.load_recipe(PROJECT, "scripted-tiny")
    recipe = recipe.model_copy(update={"command": f"{recipe.command.strip()} --kv_cache_dtype={name}"})
    with pytest.raises(ManifestError, match=BETTER[name][0]) as caught:
        vllm_command.own_argv(recipe)
    assert (caught.value.key, caught.value.got) == ("--kv-cache-dtype", name)


def test_what_vllm_knows_is_taken() -> None:
    recipe = manifests.load_recipe(PROJECT, "scripted-tiny")
    for name in ("auto", "fp8", *formats.FORMATS):
        command = f"{recipe.command.strip()} --kv-cache-dtype {name}"
        assert name in vllm_command.own_argv(recipe.model_copy(update={"command": command}))


def test_the_mod_says_the_same() -> None:
    assert {name: better for name, (better, _) in BETTER.items()} == formats.RECIPE_NAMES


def test_a_stage_whose_image_has_no_kernels_for_the_cache_is_told() -> None:
    below, own = (manifests.load_chain(PROJECT, name) for name in ("v2", STAGE))
    assert own[-1].mods == [MOD] and own[-1].serve.flags[FLAG] in formats.FORMATS
    for name in formats.FORMATS:
        assert without_mod(name, below).startswith(f"{FLAG} {name}: the image of stage v2 has no mod {MOD}; ")
        assert without_mod(name, own) == ""
    assert [name for name in (None, "auto", "fp8", "bfloat16", *BETTER) if without_mod(name, below)] == []

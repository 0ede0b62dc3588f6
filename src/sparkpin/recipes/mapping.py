"""What of a community's recipe has a counterpart here: container and build arguments, mods, keys.

A container there is whatever was newest on the day that it was built, so none maps to the very same software; what is
told is which stack takes its place, and what cannot be had.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.tags import IMAGE
from sparkpin.pins.manifests import load_community_mods
from sparkpin.pins.mods import is_needless, mod_of
from sparkpin.pins.schema import ChatTemplate
from sparkpin.recipes.recipe import ELSEWHERE, OURS, RUNNERS, V1_KEYS, V2_KEYS, CommunityRecipe
from sparkpin.releases import compile_caches

STACK = "spark"
VLLM_IMAGE = re.compile(r"(?:.*/)?vllm-openai(?:-\w+)?:v?(\d+)\.(\d+)[\w.-]*")
NVIDIA = re.compile(r"nvcr\.io/nvidia/vllm:(\S+)")
NIGHTLY = re.compile(r"vllm-node(-tf5)?(:.*)?|.*/dgx-vllm-eugr-nightly(-tf5)?(:.*)?")
WITHOUT_EFFECT, WITH_VALUE = {*RUNNERS["build_args_without_effect"]}, {*RUNNERS["build_args_with_value"]}
OF_A_DOWNLOAD = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER", "HF_ENDPOINT"}
OF_ANOTHER_CONTAINER = {
    "HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME",
    *compile_caches.ENV,
}  # fmt: skip


@dataclass(frozen=True)
class Mapping:
    stack: str  # of ours, as the stage
    stage: str
    told: tuple[str, ...]  # what takes the place of what
    unmapped: tuple[str, ...]  # what has no counterpart


def mapped(recipe: CommunityRecipe, *, stack: str | None, stage: str | None) -> Mapping:
    told: list[str] = []
    unmapped: list[str] = []
    found, _, of_container = stack_of(recipe.container)
    if recipe.origin:
        found, of_container = recipe.origin.stack, " (as the recipe says)"
    chosen = stack or found or STACK
    if stack or found:
        told.append(f"container {recipe.container or '(none)'} -> stack {chosen}{of_container}")
    else:
        unmapped.append(
            f"container {recipe.container}: nobody here knows what is in it; stack {chosen} takes its place"
        )
    unmapped += recipe.left
    unmapped += build_args(recipe.build_args)
    unmapped += keys(recipe)
    return Mapping(chosen, stage or stage_of(recipe), tuple(told), tuple(unmapped))


def stage_of(recipe: CommunityRecipe) -> str:
    """The one that an import takes where nobody names another."""
    return recipe.origin.stage if recipe.origin else stack_of(recipe.container)[1] or "base"


def stack_of(container: str) -> tuple[str | None, str | None, str]:
    """Stack, stage and what has to be said of it; no stack for a container that is not known."""
    if ours := IMAGE.fullmatch(container):
        return ours[1], ours[2], ""
    if version := VLLM_IMAGE.fullmatch(container):
        return STACK, None, f" (it is vLLM {version[1]}.{version[2]} there)"
    if version := NVIDIA.fullmatch(container):
        return STACK, None, f" (there it is NVIDIA's build of {version[1]})"
    if not container or NIGHTLY.fullmatch(container):
        return STACK, None, " (there it is what was newest on the day of its build)"
    return None, None, ""


def build_args(arguments: Sequence[str]) -> Iterator[str]:
    """Those that change what is in the image."""
    words = [word for argument in arguments for word in argument.split()]
    while words:
        word = words.pop(0)
        if word in WITH_VALUE:
            words[:1] = []
        elif word not in WITHOUT_EFFECT:
            value = words.pop(0) if words and not words[0].startswith("-") else ""
            yield f"build_args {' '.join(filter(None, [word, value]))}: no stack is built with it"


def keys(recipe: CommunityRecipe) -> Iterator[str]:
    """Keys that say something about the server and that nothing here reads."""
    read = V1_KEYS | {"model_revision", "runtime", "min_nodes", "max_nodes", "mode", "builder"}
    read |= {*OURS} if recipe.origin else set()
    for name, value in recipe.raw.items():
        said = [part for part in value.values() if part] if isinstance(value, dict) else value
        if name in ELSEWHERE or name in read or not said:
            continue
        kind = "the key" if name in V2_KEYS else "the unknown key"
        yield f"{kind} {name}: {shortened(value)}"


def shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def useless(name: str) -> str:
    """Why a variable of the community's containers is of no use in ours; "" where it may be."""
    if name in OF_A_DOWNLOAD:
        return "nothing is downloaded: the model is mounted"
    if name in OF_ANOTHER_CONTAINER:
        return "a folder of another container: the caches here lie in a volume"
    return ""


def of_mods(recipe: CommunityRecipe, project: Path, version: str) -> tuple[list[str], list[str], list[str]]:
    """Mods that stay (chat templates), what takes the place of others, and those that are refused."""
    kept: list[str] = []
    told: list[str] = []
    unmapped: list[str] = []
    known = load_community_mods(project)
    for mod in recipe.applied:
        name = mod_of(mod)
        one = known.get(name)
        if one and one.template:
            kept.append(name)
            told.append(about(name, one.template))
        elif one and is_needless(one, version):
            told.append(f"mod {name} -> nothing: {one.reason}")
        else:
            why = f"{one.reason}; instead: {one.instead or f'vLLM {one.needless}'}" if one else "no run.sh is run here"
            unmapped.append(f"mod {mod}: {why}")
    return kept, told, unmapped


def about(mod: str, template: ChatTemplate) -> str:
    return f"mod {mod} -> the template {template.name} ({template.licence}) and no run.sh: {'; '.join(template.mends)}"

"""What of a community's recipe has a counterpart here: container and build arguments, mods, keys.

A container there is whatever was newest on the day that it was built, so none maps to the very same software; what is
told is which stack takes its place, and what cannot be had.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sparkpin.core.errors import clipped
from sparkpin.core.tags import IMAGE
from sparkpin.pins.manifests import load_community_mods
from sparkpin.pins.mods import is_needless, mod_of
from sparkpin.pins.schema import ChatTemplate
from sparkpin.recipes.recipe import ELSEWHERE, OURS, V1_KEYS, V2_KEYS, CommunityRecipe
from sparkpin.recipes.sources import RUNNERS
from sparkpin.releases import compile_caches

STACK = "spark"
KNOWN = {  # containers whose place the stack takes, and what they are there
    r"": "what was newest on the day of its build",
    r"vllm-node(-tf5)?(:.*)?|.*/dgx-vllm-eugr-nightly(-tf5)?(:.*)?": "what was newest on the day of its build",
    r"(?:.*/)?vllm-openai(?:-\w+)?:v?\d+\.\d+[\w.-]*": "the vLLM of its tag",
    r"nvcr\.io/nvidia/vllm:\S+": "NVIDIA's build",
}
OF_A_DOWNLOAD = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER", "HF_ENDPOINT"}
OF_ANOTHER_CONTAINER = {
    "HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME",
    *compile_caches.ENV,
}  # fmt: skip


@dataclass
class Mapped:
    """told: what takes the place of what; unmapped: what has no counterpart; mods: chat templates, which stay."""

    stack: str
    stage: str
    told: list[str] = field(default_factory=list)
    unmapped: list[str] = field(default_factory=list)
    mods: list[str] = field(default_factory=list)


def mapped(recipe: CommunityRecipe, *, stack: str | None = None, stage: str | None = None) -> Mapped:
    """stack, stage: what people name in place of the container's."""
    said = recipe.container
    ours, there = IMAGE.fullmatch(said), next((kind for name, kind in KNOWN.items() if re.fullmatch(name, said)), "")
    if recipe.origin:
        made = Mapped(stack or recipe.origin.stack, stage or recipe.origin.stage)
        there = "the recipe says so"
    else:
        made = Mapped(stack or (ours[1] if ours else STACK), stage or (ours[2] if ours else "base"))
        there = f"there it is {there}" if there else ""
    if stack or ours or there:
        made.told.append(f"container {said or '(none)'} -> stack {made.stack}" + (f" ({there})" if there else ""))
    else:
        text = f"container {said}: nobody here knows what is in it; stack {made.stack} takes its place"
        made.unmapped.append(text)
    made.unmapped += [*recipe.left, *keys(recipe)]
    return made


def keys(recipe: CommunityRecipe) -> Iterator[str]:
    """Keys that say something about the server and that nothing here reads."""
    changes = [words for words in recipe.build_args if not {*words.split()} <= {*RUNNERS["build_args_without_effect"]}]
    if changes:
        yield f"build_args {' '.join(changes)}: no stack is built with it"
    read = V1_KEYS | ELSEWHERE | {"model_revision", "runtime", "min_nodes", "max_nodes", "mode", "builder"}
    read |= {*OURS} if recipe.origin else set()
    for name, value in recipe.raw.items():
        said = [part for part in value.values() if part] if isinstance(value, dict) else value
        if name not in read and said:
            yield f"the {'' if name in V2_KEYS else 'unknown '}key {name}: {clipped(str(value), 80)}"


def useless(name: str) -> str:
    """Why a variable of the community's containers is of no use in ours; "" where it may be."""
    if name in OF_A_DOWNLOAD:
        return "nothing is downloaded: the model is mounted"
    if name in OF_ANOTHER_CONTAINER:
        return "a folder of another container: the caches here lie in a volume"
    return ""


def take_mods(made: Mapped, recipe: CommunityRecipe, project: Path, version: str) -> None:
    """Mods that stay (chat templates), what takes the place of others, and those that are refused."""
    known = load_community_mods(project)
    for mod in recipe.applied:
        name = mod_of(mod)
        one = known.get(name)
        if one and one.template:
            made.mods.append(name)
            made.told.append(about(name, one.template))
        elif one and is_needless(one, version):
            made.told.append(f"mod {name} -> nothing: {one.reason}")
        else:
            why = f"{one.reason}; instead: {one.instead or f'vLLM {one.needless}'}" if one else "no run.sh is run here"
            made.unmapped.append(f"mod {mod}: {why}")


def about(mod: str, template: ChatTemplate) -> str:
    return f"mod {mod} -> the template {template.name} ({template.licence}) and no run.sh: {'; '.join(template.mends)}"

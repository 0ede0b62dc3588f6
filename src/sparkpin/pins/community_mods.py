"""Community mods: folders with a run.sh, which edits what is installed. None is run here: docs/mods.md.

What a recipe names is known as needless for the stack's vLLM, or a chat template (one file, known by its SHA-256), or
refused. Pure apart from reading the project's files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from sparkpin.core.errors import WHOLE, IntegrityError, ManifestError
from sparkpin.pins.manifests import COMMUNITY_MODS, load_community_mods
from sparkpin.pins.schema import ChatTemplate, CommunityMod

FOLDER = "pins/chat_templates"
WORKSPACE = "/workspace"  # where their runner starts vllm, so that a command's paths are relative to it


@dataclass(frozen=True)
class CarriedTemplate:
    """A chat template that images get, in a layer of its own. mod: whose name it has here; called: its file there."""

    mod: str
    called: str

    @property
    def file(self) -> str:
        """Below the project."""
        return f"{FOLDER}/{self.mod}.jinja"


def mod_of(name: str) -> str:
    """The name of a mod that a recipe gives by its path or its archive."""
    return name.rstrip("/").rpartition("/")[2].removesuffix(".zip").lower()


def is_needless(mod: CommunityMod, vllm: str) -> bool:
    """vllm: a version; "" fits no bounds."""
    return bool(mod.needless is not None and vllm) and SpecifierSet(mod.needless or "").contains(vllm, prereleases=True)


def read_templates(project: Path, names: Sequence[str], file: str, vllm: str) -> tuple[CarriedTemplate, ...]:
    """The templates of a recipe's `mods`, each verified. file: the recipe's; vllm: version of the stack's.

    ManifestError for a mod that is no template, and for a template that nobody has fetched.
    """
    known = load_community_mods(project)
    if len({mod_of(name) for name in names}) < len(names):
        raise ManifestError(file, "mods", list(names), "each mod once")
    found = []
    for name in names:
        mod = known.get(mod_of(name))
        if mod is None or mod.template is None:
            wanted = refusal(mod, vllm) if mod else f"a chat template of {COMMUNITY_MODS}; no run.sh is run here"
            raise ManifestError(file, "mods", name, wanted, next_step=f"take it out of `mods` of {file}")
        found.append(CarriedTemplate(mod.name, mod.template.name))
        require_file(project, found[-1], mod.template)
    return tuple(found)


def refusal(mod: CommunityMod, vllm: str) -> str:
    """What has the place of a mod that is no template."""
    if is_needless(mod, vllm):
        return f"none: vLLM {vllm} has no need of it ({mod.reason})"
    return f"{mod.instead or f'vLLM {mod.needless}, which has no need of it'} ({mod.reason})"


def require_file(project: Path, one: CarriedTemplate, template: ChatTemplate) -> None:
    path = project / one.file
    if not path.is_file():
        step = fetch_command(one.file, template) or f"bring {one.file} back"
        raise ManifestError(one.file, WHOLE, "no such file", "the chat template, which is not here yet", next_step=step)
    if (sha256 := hashlib.sha256(path.read_bytes()).hexdigest()) != template.sha256:
        step = f"bring it back, or write the new SHA-256 into {COMMUNITY_MODS} if it is meant to be so"
        raise IntegrityError(f"{path}: got sha256={sha256}, expected {template.sha256}", next_step=step)


def fetch_command(file: str, template: ChatTemplate) -> str:
    return f"curl -fL --create-dirs -o {file} {template.url}" if template.url else ""


def to_fetch(project: Path, names: Sequence[str]) -> list[str]:
    """A command for each chat template of `mods` that is not here yet."""
    found = {CarriedTemplate(mod_of(name), "").file: one for name, one in templates_of(project, names).items()}
    return [fetch_command(file, one) for file, one in found.items() if one.url and not (project / file).is_file()]


def templates_of(project: Path, names: Sequence[str]) -> dict[str, ChatTemplate]:
    """Mod -> its chat template, of those that are one. Nothing need be fetched."""
    known = load_community_mods(project)
    return {name: mod.template for name in names if (mod := known.get(mod_of(name))) and mod.template}


def template_names(project: Path, names: Sequence[str]) -> frozenset[str]:
    """What --chat-template may call those of `mods`."""
    return frozenset(template.name for template in templates_of(project, names).values())


def in_workspace(argv: Sequence[str]) -> list[str]:
    """A command line whose chat template is found where the images have it."""
    done = list(argv)
    for at, word in enumerate(done):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") != "--chat-template":
            continue
        place = at if equals else at + 1
        path = value if equals else done[place] if place < len(done) else ""
        if path.endswith(".jinja") and not path.startswith("/"):
            done[place] = f"{flag}={WORKSPACE}/{path}" if equals else f"{WORKSPACE}/{path.removeprefix('./')}"
    return done

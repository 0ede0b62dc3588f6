"""A model or somebody's recipe as one of recipes/, with its pins and locks.

They are made in a trial project of links to this one, where lock, plan and checks find what is new; where that fails,
nothing is written. Then the files are renamed into this project one by one, the recipe last. A run that is killed
between them leaves a pin, which the next one uses.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, InputError, ManifestError, NetworkError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import printable
from sparkpin.fetch.hub import HubRepository
from sparkpin.fetch.lock_model import lock_model
from sparkpin.fetch.model import has_listings
from sparkpin.fetch.model_files import config_here
from sparkpin.fetch.store import scratch
from sparkpin.pins import drafters, manifests, schema, vllm_command
from sparkpin.pins.reading import parse
from sparkpin.pins.vllm_flags import flag_value
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes.adopt import HERE, Adopted, Wanted, adopt, plain_name
from sparkpin.recipes.render import REPO
from sparkpin.recipes.sizes import MOST, SHARE, fit, plan_of, requests_of, with_flags, words_of
from sparkpin.recipes.vllm_parser import parser_of

PREFIX = "hf:"
HUB = re.compile(rf"{PREFIX}({REPO.pattern})(?:@([\w./-]+))?", re.ASCII)
PAGE = re.compile(rf"(?:https?://huggingface\.co/)?({REPO.pattern})", re.ASCII)  # what people type for it
COMMIT = re.compile(r"[0-9a-f]{40}")
COMMON = re.compile(r"(?:recipe|run|start|serve|launch|vllm|(?:docker-)?compose)\b", re.IGNORECASE)  # names of files
VECTORS = "modules.json"  # the file of sentence-transformers, whose architectures may also be those of a chat model
PINS = "pins/models"
Entry = schema.PinnedRepository | schema.RepositoryLock
# Where nothing says it: tokens of a draft, as those of docs/drafters.md#what-was-run that have no block, and the share
# of them that the smoke test demands. No source has it: right drafters are far above it there, a broken one had 0.01.
DRAFTED, FLOOR = 3, 0.1
LONGEST = 150  # letters of a name: tags and containers have longer ones, of at most 255, made of it


def recipe_name(wanted: Wanted, model: str = "") -> str:
    """Of the recipe that it comes to: that of the file, but of the `model` for one that is called as any is. InputError
    for one that is too long for a file."""
    if wanted.what.startswith(PREFIX):
        model = read_hub(wanted.what)[0]
    elif not COMMON.match(Path(wanted.what).name):
        model = Path(wanted.what).stem
    name = plain_name(wanted.name or model.rstrip("/").rpartition("/")[2])
    if len(name) > LONGEST:
        raise InputError(f"--name: got {len(name)} letters, expected at most {LONGEST}", next_step="--name SHORTER")
    return name


def read_hub(word: str) -> tuple[str, str]:
    """Repository and revision of `hf:OWNER/NAME[@REV]`, "" where it names no revision."""
    if found := HUB.fullmatch(word):
        return found[1], found[2] or ""
    step = f"for example {PREFIX}Qwen/Qwen3-8B"
    raise InputError(f"got {word!r}, expected {PREFIX}OWNER/NAME or {PREFIX}OWNER/NAME@REVISION", next_step=step)


@contextlib.contextmanager
def add(paths: Paths, wanted: Wanted) -> Iterator[Adding]:
    """A new recipe in a trial project; `Adding.write` takes it into this one.

    Raises InputError for a name that is taken and a model that cannot be served, ManifestError for a file that cannot,
    and what `lock_model` raises.
    """
    is_model = wanted.what.startswith(PREFIX)
    if wanted.nodes is not None and wanted.nodes < 1:
        raise InputError(f"--nodes: got {wanted.nodes}, expected 1 or more", next_step="--nodes 2")
    if not is_model and not Path(wanted.what).exists() and (meant := PAGE.fullmatch(wanted.what)):
        raise InputError(f"{wanted.what}: no such file", next_step=f"{PREFIX}{meant[1]} for one of the Hub, or a file")
    repo, revision = read_hub(wanted.what) if is_model else (wanted.model, "")
    drafter, drafter_revision = read_hub(wanted.drafter) if wanted.drafter else (None, "")
    read = line_of(repo) if is_model else foreign.load(Path(wanted.what))
    if repo and not REPO.fullmatch(read.model):
        read = read.model_copy(update={"model": repo})
    target = paths.project / f"recipes/{recipe_name(wanted, read.model)}.yaml"
    adopted = adopt(paths.project, read, target.stem, replace(wanted, drafter=drafter))
    if wanted.model not in ("", adopted.value["model"]):
        cause = f"--model {wanted.model}: {wanted.what} serves {adopted.value['model']}"
        raise InputError(cause, next_step="leave --model out")
    recipe = parse(schema.Recipe, adopted.value, target)  # before anything is fetched
    with trial_of(paths) as trial:
        if target.exists() and not wanted.replaces:  # asked where no other `add` runs
            raise InputError(f"{target} is there already", next_step="--name NAME of the new one, or --replace")
        adding = Adding(trial, wanted.locks, adopted, recipe)
        adding.pin_model(revision, adopted.model_revision)
        if recipe.drafter:
            adding.pin_drafter(drafter_revision, adopted.drafter_revision)
        adding.choose_family()
        if is_model:
            adding.choose_sizes()
        else:
            adding.explain_share(read)
        origin = wanted.what if is_model else f"{read.path.name}, a recipe of version {read.shown_version}"
        adding.save(f"Added from {origin}, by `invoke add`.")
        yield adding


def line_of(repo: str) -> foreign.CommunityRecipe:
    """The recipe that a repository alone comes to."""
    command = f"vllm serve {repo} --host {HERE} --port 8000"
    return foreign.CommunityRecipe(path=Path(repo), version=foreign.LINE, description=repo, model=repo, command=command)


@contextlib.contextmanager
def trial_of(paths: Paths) -> Iterator[Paths]:
    """A project of links to this one's files, in which pins and recipes may be written; errors name this one."""
    waiting = files.lock(paths.locks / "add.lock", on_wait="waiting for another `invoke add`")
    with waiting, scratch(paths.work / "add") as folder:
        for path in paths.project.iterdir():
            if path.name in ("pins", "recipes"):
                shutil.copytree(path, folder / path.name, copy_function=os.symlink)
            else:
                (folder / path.name).symlink_to(path)
        for place in (PINS, "recipes"):
            (folder / place).mkdir(parents=True, exist_ok=True)
        try:
            yield replace(paths, project=folder)
        except SparkpinError as error:
            if isinstance(error, NetworkError):
                error.next_step += "; `invoke add ... --no-lock` asks no Hub"
            error.message = error.message.replace(str(folder), str(paths.project))
            error.next_step = error.next_step.replace(str(folder), str(paths.project))
            raise


@dataclass
class Adding:
    """A recipe on its way. paths: of the trial project; config: of the model, empty where nobody knows it; reasons: of
    its sizes."""

    paths: Paths
    locks: bool
    adopted: Adopted
    recipe: schema.Recipe
    config: Mapping[str, Any] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def change(self, **changes: Any) -> None:
        self.adopted.value |= changes
        self.adopted.value["command"] = self.adopted.value.pop("command")  # the longest comes last
        self.recipe = parse(schema.Recipe, self.adopted.value, self.recipe.file)

    def set_flags(self, flags: Mapping[str, schema.FlagValue]) -> None:
        changed = with_flags(self.recipe, flags)
        self.change(command=changed.command, defaults=changed.defaults)

    def note_unknown(self, what: str) -> None:
        self.adopted.notes.append(f"not known: {what}")

    def pin_model(self, typed: str, written: str) -> None:
        """typed, written: see `pin`. InputError for a model that writes no text."""
        _, entry, self.config = self.pin(self.recipe.model, typed, written)
        vllm, names = manifests.load_stack(self.paths.project, self.recipe.stack).vllm, self.config["architectures"]
        known = parser_of(vllm).architectures
        parts = [*names, *(row.file for row in getattr(entry, "files", ()))]
        if wrong := [part for part in parts if part in (*known["other"], VECTORS)]:
            cause = f"{self.recipe.model}: got {wrong[0]}, expected a model that writes text"
            raise InputError(cause, next_step="choose one that chats; embeddings, scores and drafts are not served")
        for name in names:
            if name not in known["text"]:
                self.note_unknown(f"whether vLLM {vllm} serves {name}")
        if "auto_map" in self.config:
            self.note_unknown("whether vLLM has it: the repository brings code (auto_map), which is not run")
        self.change(model_revision=entry.revision)

    def pin_drafter(self, typed: str, written: str) -> None:
        """Where the recipe does not say how it drafts, and how many tokens, its config.json or its name does."""
        repo, plan = self.recipe.drafter or "", drafters.speculation(words_of(self.recipe))
        pin, entry, config = self.pin(repo, typed, written)
        known = {"method": pin.drafts.method} if pin.drafts else {}
        method = drafters.method_of(known | plan, repo, config)
        longest = pin.drafts.tokens if pin.drafts else drafters.longest_draft(method, config)
        tokens = plan.get(drafters.TOKENS) or longest or DRAFTED
        if pin.drafts is None:
            drafts = {"method": method, "tokens": longest or tokens, "acceptance_floor": FLOOR}
            file = self.pin_file(pin.name)
            self.write_text(file, f"{file.read_text(encoding='utf-8')}\n{foreign.text_of({'drafts': drafts}, [])}")
            manifests.load_model(self.paths.project, pin.name)  # raises for a method that is none
        why = f"at most {longest}" if longest else f"{DRAFTED} by default"
        self.adopted.notes.append(f"drafter {repo}: method {method}, {tokens} tokens a draft ({why})")
        self.change(drafter_revision=entry.revision)
        if (asked := plan | {"method": method, drafters.TOKENS: tokens}) != plan:
            self.set_flags({drafters.FLAG: asked})

    def pin(self, repo: str, typed: str, written: str) -> tuple[schema.ModelPin, Entry, Mapping[str, Any]]:
        """Of a repository: the pin that is there, else a new one; its part of the lock, or of the pin where there is no
        lock; its config.json as far as it is known. typed, written: a commit, a branch, or "" for the newest, by the
        person and in the file. Where the pin has another, typed is an InputError, and written is not mapped."""
        project, revision = self.paths.project, typed or written
        if revision not in ("", schema.UNRESOLVED) and not COMMIT.fullmatch(revision):
            if not self.locks:
                step = "give its 40 hex digits, or leave --no-lock out"
                raise InputError(f"{repo}: got revision {revision}, expected a commit: no Hub is asked", next_step=step)
            revision = HubRepository(repo, revision).list_files().commit
        pins = manifests.readable_models(project)[0]
        pin = next((one for one in pins if one.repositories[one.base].repo == repo), None)
        if pin is None:
            usual = (plain_name(repo.rpartition("/")[2]), plain_name(repo))
            free = [name for name in usual if not self.pin_file(name).exists()]
            if not free:
                cause = f"{PINS}/{usual[1]}.yaml pins another repository"
                raise InputError(cause, next_step=f"rename it, or pin {repo}")
            pin = self.write_pin(free[0], repo, revision if COMMIT.fullmatch(revision) else schema.UNRESOLVED)
        lock = None if manifests.unlocked(project, pin) else manifests.load_model_lock(project, pin)
        if lock is None and self.locks:
            lock = lock_model(self.paths, pin.name)
        entry = (lock or pin).repositories[pin.base]
        if COMMIT.fullmatch(revision) and entry.revision != revision:
            differs = f"revision {revision} of {repo}: {PINS}/{pin.name} has {entry.revision}"
            if typed:
                raise InputError(differs, next_step="leave the revision out, or pin and lock the other commit")
            self.adopted.unmapped.append(differs)
        state = "not locked yet:" if entry.revision == schema.UNRESOLVED else f"at {entry.revision}, as"
        self.adopted.notes.append(f"{repo} {state} {PINS}/{pin.name}")
        config = config_here(self.paths, pin, lock) or {}
        names = config.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            step = "choose another repository, or revision"
            raise ManifestError(f"config.json of {repo}", "architectures", names, "a list of names", next_step=step)
        return pin, entry, {**config, "architectures": names}

    def pin_file(self, name: str) -> Path:
        return self.paths.project / f"{PINS}/{name}.yaml"

    def write_text(self, file: Path, text: str) -> None:
        file.unlink(missing_ok=True)  # it may be a link to the project's own
        file.write_text(text, encoding="utf-8")

    def write_pin(self, name: str, repo: str, revision: str) -> schema.ModelPin:
        value: dict[str, Any] = {"description": f"{repo} as published", "base": "base"}
        value |= {"repositories": {"base": {"repo": repo, "revision": revision}}}
        pin = parse(schema.ModelPin, {"name": name} | value, self.pin_file(name))
        self.write_text(self.pin_file(name), foreign.text_of(value, ["Made by `invoke add`."]))
        return pin

    def choose_family(self) -> None:
        """By the name, else by the architecture where one family alone has it."""
        families, recipe = manifests.load_families(self.paths.project), self.recipe
        names, clue = self.config["architectures"], "its name"
        family = vllm_command.family_of(families, recipe.model, recipe.family)
        if family is None:
            fitting = [family for family in families if {*names} & {*family.architectures}]
            if len(fitting) != 1:
                rivals = ", ".join(one.name for one in fitting) or "no family of pins/families.yaml"
                why = f"{', '.join(names) or 'an unknown architecture'} is that of {rivals}; the name fits none"
                self.note_unknown(f"its parsers, so none is set: {why}")
                return
            family, clue = fitting[0], f"its architecture, {', '.join(names)}"
            self.change(family=family.name)
        vllm = manifests.load_stack(self.paths.project, recipe.stack).vllm
        choices = vllm_command.choices(family, vllm, words_of(recipe))
        lines = [one.line.removeprefix("chosen: ") for one in choices]
        self.adopted.notes += [f"family {family.name}: by {clue}", *lines]

    def choose_sizes(self) -> None:
        """By the plan. Where that does not know the model, vLLM's defaults stay, except its share of the memory."""
        has_gpu = manifests.load_stack(self.paths.project, self.recipe.stack).gpu is not None
        flags: dict[str, schema.FlagValue] = {SHARE: MOST} if has_gpu else {}
        self.reasons = [f"{SHARE} {MOST}: more has frozen Sparks"] if has_gpu else []
        try:
            if self.locks:
                flags, self.reasons = fit(self.paths, self.recipe)
        except (ManifestError, CheckpointError) as error:  # an InputError: it does not fit
            self.note_unknown(f"what fits, so vLLM's own context and requests stay: {error.message}")
        self.set_flags(flags)

    def explain_share(self, read: foreign.CommunityRecipe) -> None:
        """Where the share of the memory is from, and what it is good for by the plan."""
        if (share := flag_value(words_of(self.recipe), SHARE)) is None:
            return
        written = flag_value(read.command.split(), SHARE) not in (None, "{gpu_memory_utilization}")
        in_file = read.version != "2" or "gpu_memory_utilization" in read.defaults or written
        why = f"as {read.path.name} sets it" if in_file else "sparkrun's default on a Spark"
        if self.locks:
            with contextlib.suppress(ManifestError, CheckpointError):  # a model that the plan does not know
                pin = manifests.model_of(self.paths.project, self.recipe)
                # Nothing is fetched for a comment.
                if has_listings(self.paths, pin, manifests.load_model_lock(self.paths.project, pin)):
                    why += f"; by the plan {requests_of(plan_of(self.paths, self.recipe, {}))}"
        self.reasons = [printable(f"{SHARE} {share}: {why}")]

    def save(self, head: str) -> None:
        self.adopted.notes += self.reasons
        comments = [head, *self.reasons, *(f"not mapped: {line}" for line in self.adopted.unmapped)]
        text = foreign.text_of(self.adopted.value, [printable(line) for line in comments])
        self.write_text(self.paths.project / self.recipe.file, text)

    def new(self) -> list[str]:
        """What is no link: pins and their locks, and the recipe, which names them, at the end."""
        found = [path for place in (PINS, "recipes") for path in sorted((self.paths.project / place).iterdir())]
        return [
            path.relative_to(self.paths.project).as_posix()
            for path in found
            if path.is_file() and not path.is_symlink()
        ]

    def write(self, project: Path) -> None:
        for file in self.new():
            with files.atomic_file(project / file) as out:
                out.write((self.paths.project / file).read_bytes())

"""A release as a recipe of the community, so that its tools run our image.

Its command is the release's own, with the settings that those tools change as placeholders. A checkpoint that was made
here lies in a folder of this machine: sparkrun mounts the folder that `model` names, spark-vllm-docker wants `-v`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparkpin.core.errors import InputError, ManifestError
from sparkpin.pins import drafters, values
from sparkpin.pins.nodes import EXECUTOR, NODES, nodes_of
from sparkpin.pins.vllm_flags import MODEL_PATH, drop_flags, flag_value, parse_flags, read_json, set_flag
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes.render import escaped, render
from sparkpin.recipes.shell import FACTS

Format = Literal["v1", "v2"]
TOOLS: dict[Format, str] = {"v1": "spark-vllm-docker", "v2": "sparkrun"}
HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"
INDENT = " \\\n  "
# spark-vllm-docker makes /workspace in the container, which our image's user may not.
AS_ROOT = "VLLM_SPARK_EXTRA_DOCKER_ARGS='--user 0:0'"


@dataclass(frozen=True)
class ExportedRecipe:
    """image: its tag; published: whether the checkpoint is the repository as it is; checkpoint: where it lies, or will.

    origin: what `invoke add` needs to make the same release of it; None where nobody knows it any more.
    """

    name: str
    description: str
    image: str
    argv: tuple[str, ...]
    env: dict[str, str]
    published: bool
    checkpoint: Path
    origin: foreign.RecipeOrigin | None


def export(subject: ExportedRecipe, form: Format) -> str:
    """ManifestError for words that this format cannot hold: its runner would make others of them."""
    if drafters.speculation(subject.argv).get("model") == drafters.PATH:
        text = f"{subject.image} is served with a second model that lies in its checkpoint: {form} cannot say so"
        raise InputError(text, next_step=f"invoke export {subject.image}, which takes both")
    values.require_values(subject.argv, subject.env, subject.name)  # their runners' shells read all of it
    value = value_of(subject, form)
    server = render(foreign.of(value, Path(f"{subject.name}.yaml")))
    read, wanted = (
        drop_flags([*argv[:2], MODEL_PATH, *argv[3:]], "--host", "--revision", EXECUTOR, NODES)
        for argv in ([*server.argv, *server.left], subject.argv)
    )  # without what a format says in its own way
    if read != wanted:
        word = next((one for one in wanted if one not in read), shlex.join(read))
        file = f"recipe {subject.name}, for {TOOLS[form]}"
        step = "take the other format, or leave that flag out of the recipe"
        raise ManifestError(file, "command", word, "words without its runner's placeholders", next_step=step)
    return foreign.text_of(value, comments(subject, form, flag_value(server.argv, "--host")))


def value_of(subject: ExportedRecipe, form: Format) -> dict[str, Any]:
    origin, machines = subject.origin, nodes_of(subject.argv)
    argv = list(subject.argv) if machines == 1 else drop_flags(subject.argv, EXECUTOR, NODES)  # their runners add them
    if form == "v2" and flag_value(argv, "--host") == HERE:  # sparkrun 0.4.2 asks the machine's own address
        argv = set_flag(argv, "--host", EVERYWHERE)
    ours = {"sparkpin": origin.model_dump()} if origin else {}
    repository, env = dict[str, Any](), dict(subject.env)
    if subject.published and origin:
        argv[3:3] = ["--revision", origin.model_revision]  # sparkrun 0.2 fills in no {model_revision}
        repository = {"model": origin.model, "model_revision": origin.model_revision}
    argv[2] = "MODEL" if form == "v2" else repository.get("model", MODEL_PATH)
    command, settings = command_of(argv, doubled=form == "v1")
    if form == "v2":
        value = {"recipe_version": "2", **(repository or {"model": str(subject.checkpoint)})}
        value |= {"container": subject.image, "runtime": "vllm" if machines == 1 else "vllm-distributed"}
        value |= {"min_nodes": machines, "max_nodes": machines}
        value |= {"metadata": {"description": subject.description, **ours}}
        command = command.replace(" MODEL ", " {model} ", 1)
    else:
        value = {"recipe_version": "1", "name": subject.name, "description": subject.description}
        value |= {key: name for key, name in repository.items() if key == "model"}
        value |= {"container": subject.image, "solo_only" if machines == 1 else "cluster_only": True, "metadata": ours}
        env = {key: escaped(text) for key, text in env.items()}
        env |= {"HF_HOME": "/root/.cache/huggingface"} if repository else {}
    return value | {"defaults": settings, "env": env, "command": command}


def comments(subject: ExportedRecipe, form: Format, host: str | None) -> list[str]:
    """host: where the server will listen, on all addresses where no flag says it."""
    machines = nodes_of(subject.argv)
    lines = [
        f"{subject.image}, for {TOOLS[form]}. Written by `invoke recipe export`.",
        "The image has to be in the engine that runs it: invoke export to it, or to a file and docker load.",
    ]
    if not re.fullmatch(r"localhost|::1|127(\.\d{1,3}){3}", host or ""):
        where = "all addresses" if host in (None, "", EVERYWHERE, "::") else host
        lines.append(f"It listens on {where}, without an API key: whoever reaches its machine may use it.")
    mount = ""
    if not subject.published:
        lines.append(f"Checkpoint: {subject.checkpoint}, which `invoke build --checkpoint-only` makes.")
        mount = f" -v {subject.checkpoint}:{MODEL_PATH}"
    if form == "v1":
        lines.append(f"Start it with: {AS_ROOT} ./run-recipe.sh FILE{' --solo' if machines == 1 else ''}{mount}")
    return lines


def command_of(argv: Sequence[str], *, doubled: bool) -> tuple[str, dict[str, Any]]:
    """One flag a line, and the values of its placeholders. doubled: braces that are none stand twice.

    Of a flag that stands twice neither becomes a setting.
    """
    head, flags = parse_flags(argv)
    keys, text = [flag.key for flag in flags], " ".join(argv)  # sparkrun fills in what only looks like a placeholder
    settings: dict[str, Any] = {}
    lines = [[quoted(word, doubled) for word in head]]
    for flag in flags:
        name, value = FACTS["settings"].get(flag.key), flag.words[-1]
        is_plain = len(flag.words) == 2 and keys.count(flag.key) == 1 and not re.search(r"\{[\w-]+\}|'", value)
        if name is None or not is_plain or f"{{{name}}}" in text:
            lines.append([quoted(word, doubled) for word in flag.words])
        else:
            settings[name] = number(value)
            shown = f"{{{name}}}"
            lines.append([flag.words[0], shown if shlex.quote(value) == value else f"'{shown}'"])
    return INDENT.join(map(" ".join, lines)) + "\n", settings


def quoted(word: str, doubled: bool) -> str:
    return shlex.quote(re.sub(r"([{}])", r"\1\1", word) if doubled else word)


def number(text: str) -> int | float | str:
    """A number where it comes back as the same text: 0.90 would not."""
    value = read_json(text)
    return value if type(value) in (int, float) and str(value) == text else text

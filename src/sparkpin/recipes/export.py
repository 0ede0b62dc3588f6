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
from sparkpin.pins import drafters
from sparkpin.pins.nodes import EXECUTOR, NODES, nodes_of
from sparkpin.pins.values import require_values
from sparkpin.pins.vllm_flags import MODEL_PATH, drop_flags, flag_value, set_flag
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes import template, yamlfile
from sparkpin.recipes.render import escaped, render

Format = Literal["v1", "v2"]
TOOLS: dict[Format, str] = {"v1": "spark-vllm-docker", "v2": "sparkrun"}
HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"
AS_ROOT = "VLLM_SPARK_EXTRA_DOCKER_ARGS='--user 0:0'"
"""spark-vllm-docker makes /workspace in the container, which our image's user may not."""


@dataclass(frozen=True)
class ExportedRecipe:
    """image: its tag; published: whether the checkpoint is the repository as it is; checkpoint: where it lies, or will.

    origin: what `invoke recipe import` needs to make the same release of it; None where nobody knows it any more.
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
        text = (
            f"{subject.image} is served with a second model that lies in its checkpoint: no file of {form} can say so"
        )
        raise InputError(text, next_step=f"invoke export {subject.image}, which takes both")
    require_values(subject.argv, subject.env, subject.name)  # their runners' shells read all of it
    value = value_of(subject, form)
    server = render(foreign.of(value, Path(f"{subject.name}.yaml")))
    made, wanted = as_compared([*server.argv, *server.left]), as_compared(subject.argv)
    if made != wanted:
        word = next((one for one in wanted if one not in made), shlex.join(made))
        file = f"recipe {subject.name}, for {TOOLS[form]}"
        step = "take the other format, or leave that flag out of the recipe"
        raise ManifestError(file, "command", word, "words without its runner's placeholders", next_step=step)
    return yamlfile.text_of(value, comments(subject, form, flag_value(server.argv, "--host")))


def as_compared(argv: Sequence[str]) -> list[str]:
    """Without what a format says in its own way."""
    return drop_flags([*argv[:2], MODEL_PATH, *argv[3:]], "--host", "--revision", EXECUTOR, NODES)


def value_of(subject: ExportedRecipe, form: Format) -> dict[str, Any]:
    origin, machines = subject.origin, nodes_of(subject.argv)
    argv = list(subject.argv) if machines == 1 else drop_flags(subject.argv, EXECUTOR, NODES)  # their runners add them
    if form == "v2" and flag_value(argv, "--host") == HERE:  # sparkrun 0.4.2 asks the machine's own address
        argv = set_flag(argv, "--host", EVERYWHERE)
    metadata = {"sparkpin": origin.model_dump()} if origin else {}
    repository: dict[str, Any] = {}
    if subject.published and origin:
        argv[3:3] = ["--revision", origin.model_revision]  # sparkrun 0.2.40 fills in no {model_revision}
        repository = {"model": origin.model, "model_revision": origin.model_revision}
    argv[2] = "MODEL" if form == "v2" else repository.get("model", MODEL_PATH)
    command, settings = template.command_of(argv, doubled=form == "v1")
    if form == "v1":
        cache = {"HF_HOME": "/root/.cache/huggingface"} if repository else {}
        return {
            "recipe_version": "1",
            "name": subject.name,
            "description": subject.description,
            **{key: value for key, value in repository.items() if key == "model"},
            "container": subject.image,
            "solo_only" if machines == 1 else "cluster_only": True,
            "metadata": metadata,
            "defaults": settings,
            "env": {name: escaped(value) for name, value in (subject.env | cache).items()},
            "command": command,
        }
    return {
        "recipe_version": "2",
        **(repository or {"model": str(subject.checkpoint)}),
        "runtime": "vllm" if machines == 1 else "vllm-distributed",
        "container": subject.image,
        "min_nodes": machines,
        "max_nodes": machines,
        "metadata": {"description": subject.description, **metadata},
        "defaults": settings,
        "env": dict(subject.env),
        "command": command.replace(" MODEL ", " {model} ", 1),
    }


def comments(subject: ExportedRecipe, form: Format, host: str | None) -> list[str]:
    """host: where the server will listen; None where no flag says it."""
    lines = [
        f"{subject.image}, for {TOOLS[form]}. Written by `invoke recipe export`.",
        "The image has to be in the engine that runs it: invoke export to it, or to a file and docker load.",
    ]
    if (machines := nodes_of(subject.argv)) > 1:
        lines.append(f"For {machines} machines, each of which needs the image and the model's files.")
    lines += listening(host)
    if host != flag_value(subject.argv, "--host"):
        lines.append(f"Where sparkrun runs on that machine, too, host: {HERE} does.")
    if subject.published and subject.origin:
        lines.append(f"Model: {subject.origin.model} at {subject.origin.model_revision}, as published.")
    else:
        lines.append(f"Checkpoint: {subject.checkpoint}, which `invoke build --checkpoint-only` makes.")
    if form == "v1":
        mount = "" if subject.published else f" -v {subject.checkpoint}:{MODEL_PATH}"
        solo = " --solo" if machines == 1 else ""
        lines.append(f"Start it with: {AS_ROOT} ./run-recipe.sh FILE{solo}{mount}")
    return lines


def listening(host: str | None) -> list[str]:
    """Empty for a loopback address. vLLM listens on all addresses where none is given."""
    if host and re.fullmatch(r"localhost|::1|127(\.\d{1,3}){3}", host):
        return []
    where = "all addresses" if host in (None, "", EVERYWHERE, "::") else host
    return [f"It listens on {where}, without an API key: whoever reaches its machine may use it."]

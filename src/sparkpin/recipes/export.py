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

from sparkpin.core.errors import ManifestError
from sparkpin.pins.nodes import EXECUTOR, NODES, PIPELINE, TENSOR, nodes_of
from sparkpin.pins.values import require_values
from sparkpin.pins.vllm_flags import MODEL_PATH, drop_flags, flag_value, parse_flags
from sparkpin.recipes import recipe as foreign
from sparkpin.recipes import template, yamlfile
from sparkpin.recipes.render import escaped, render

Format = Literal["v1", "v2"]
TOOLS: dict[Format, str] = {"v1": "spark-vllm-docker", "v2": "sparkrun"}
HERE = "127.0.0.1"
AS_ROOT = "VLLM_SPARK_EXTRA_DOCKER_ARGS='--user 0:0'"
"""spark-vllm-docker makes /workspace in the container, which our image's user may not."""
SETTINGS = {
    "--host": "host",
    "--port": "port",
    "--served-model-name": "served_model_name",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    TENSOR: "tensor_parallel",
    PIPELINE: "pipeline_parallel",
}


@dataclass(frozen=True)
class ExportedRecipe:
    name: str
    description: str
    image: str  # its tag
    argv: tuple[str, ...]
    env: dict[str, str]
    repo: str  # of the model's base, as revision: "" where nobody knows them any more
    revision: str
    published: bool  # whether the checkpoint is the repository as it is
    checkpoint: Path  # the folder that it lies in, or will
    stack: str
    stage: str
    mods: tuple[str, ...] = ()  # of the recipe, which are in the image

    @property
    def origin(self) -> dict[str, Any]:
        """What `invoke recipe import` needs to make the same release of it; its keys are no runner's."""
        named: dict[str, Any] = {
            "model": self.repo,
            "model_revision": self.revision,
            "stack": self.stack,
            "stage": self.stage,
        }
        return {"sparkpin": {**named, "mods": list(self.mods)}} if self.repo else {}


def text_of(subject: ExportedRecipe, form: Format) -> str:
    return yamlfile.text_of(value_of(subject, form), comments(subject, form))


def value_of(subject: ExportedRecipe, form: Format) -> dict[str, Any]:
    """ManifestError for words that this format cannot hold: its runner would make others of them."""
    value = written(subject, form)
    made = runner_words(subject, form, value)
    if (seen := as_compared(made)) != (wanted := as_compared(subject.argv)):
        word = next((one for one in wanted if one not in seen), shlex.join(made))
        file = f"recipe {subject.name}, for {TOOLS[form]}"
        step = "take the other format, or leave that flag out of the recipe"
        raise ManifestError(file, "command", word, "words without its runner's placeholders", next_step=step)
    return value


def runner_words(subject: ExportedRecipe, form: Format, value: dict[str, Any]) -> tuple[str, ...]:
    made = render(foreign.of(value, Path(f"{subject.name}.yaml"), form[1:], ()))
    return (*made.argv, *made.before, *made.lost, *filter(None, [made.plumbing]))


def as_compared(argv: Sequence[str]) -> list[str]:
    """Without what a format says in its own way."""
    return drop_flags([*argv[:2], MODEL_PATH, *argv[3:]], "--host", "--revision", EXECUTOR, NODES)


def host_of(subject: ExportedRecipe, form: Format) -> str | None:
    """Where the server that the runner starts will listen; None where no flag says it."""
    return flag_value(runner_words(subject, form, written(subject, form)), "--host")


def listening(host: str | None) -> str:
    """Empty for a loopback address. vLLM listens on all addresses where none is given."""
    if host and re.fullmatch(r"localhost|::1|127(\.\d{1,3}){3}", host):
        return ""
    where = "all addresses" if host in (None, "", "0.0.0.0", "::") else host
    return f"It listens on {where}, without an API key: whoever reaches its machine may use it."


def written(subject: ExportedRecipe, form: Format) -> dict[str, Any]:
    require_values(subject.argv, subject.env, subject.name)  # their runners' shells read all of it
    nodes = nodes_of(subject.argv)
    own = drop_flags(subject.argv, EXECUTOR, NODES) if nodes > 1 else subject.argv  # their runners add them
    words, settings = with_settings(own)
    if form == "v1":
        words[2] = subject.repo if subject.published else MODEL_PATH
        if subject.published:
            words[3:3] = ["--revision", subject.revision]
        env = subject.env | ({"HF_HOME": "/root/.cache/huggingface"} if subject.published else {})
        return {
            "recipe_version": "1",
            "name": subject.name,
            "description": subject.description,
            **({"model": subject.repo} if subject.published else {}),
            "container": subject.image,
            "solo_only" if nodes == 1 else "cluster_only": True,
            **({"metadata": subject.origin} if subject.origin else {}),
            "defaults": settings,
            "env": {name: escaped(value) for name, value in env.items()},
            "command": template.command_of(words, settings, doubled=True),
        }
    words[2] = "{model}"
    if subject.published:
        words[3:3] = ["--revision", subject.revision]  # sparkrun 0.2.40 fills in no {model_revision}
    if settings.get("host") == HERE:  # sparkrun 0.4.2 asks the machine's own address whether it is up
        settings["host"] = "0.0.0.0"
    command = template.command_of(words, settings, doubled=False)
    return {
        "recipe_version": "2",
        "model": subject.repo if subject.published else str(subject.checkpoint),
        **({"model_revision": subject.revision} if subject.published else {}),
        "runtime": "vllm" if nodes == 1 else "vllm-distributed",
        "container": subject.image,
        "min_nodes": nodes,
        "max_nodes": nodes,
        "metadata": {"description": subject.description, **subject.origin},
        "defaults": settings,
        "env": dict(subject.env),
        "command": command.replace("'{model}'", "{model}"),
    }


def with_settings(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words with marks for the settings, and these. Of a flag that stands twice neither becomes one."""
    head, flags = parse_flags(argv)
    settings: dict[str, Any] = {}
    words = list(head)
    keys, text = [flag.key for flag in flags], " ".join(argv)  # sparkrun fills in what only looks like a placeholder
    for flag in flags:
        name = SETTINGS.get(flag.key)
        several = len(flag.words) != 2 or keys.count(flag.key) > 1
        if name is None or several or not template.usable(flag.words[1]) or f"{{{name}}}" in text:
            words += flag.words
            continue
        settings[name] = number(flag.words[1])
        words += [flag.words[0], f"{template.BEGIN}{name}{template.END}"]
    return words, settings


def number(text: str) -> int | float | str:
    """A number where it comes back as the same text: 0.90 would not."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if str(value) == text:
            return value
    return text


def comments(subject: ExportedRecipe, form: Format) -> list[str]:
    lines = [
        f"{subject.image}, for {TOOLS[form]}. Written by `invoke recipe export`.",
        "The image has to be in the engine that runs it: invoke export to it, or to a file and docker load.",
    ]
    if (nodes := nodes_of(subject.argv)) > 1:
        lines.append(f"For {nodes} machines, each of which needs the image and the model's files.")
    model = f"Model: {subject.repo} at {subject.revision}, as published."
    host = host_of(subject, form)
    lines += [line] if (line := listening(host)) else []
    if host != flag_value(subject.argv, "--host"):  # written for sparkrun
        lines.append(f"Where sparkrun runs on that machine, too, host: {HERE} does.")
    made_here = f"Checkpoint: {subject.checkpoint}, which `invoke build --checkpoint-only` makes."
    lines.append(model if subject.published else made_here)
    if form == "v1":
        mount = "" if subject.published else f" -v {subject.checkpoint}:{MODEL_PATH}"
        solo = " --solo" if nodes_of(subject.argv) == 1 else ""
        lines.append(f"Start it with: {AS_ROOT} ./run-recipe.sh FILE{solo}{mount}")
    return lines

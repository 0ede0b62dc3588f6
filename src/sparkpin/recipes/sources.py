"""How else people start a server: `vllm serve`, `docker run`, a Compose file, a script that holds one of these.

Each comes to the words and variables of `vllm serve`. What a container's options said besides is listed as not carried.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkpin.core.errors import ManifestError, short
from sparkpin.pins.values import SECRET_NAME
from sparkpin.recipes import shell
from sparkpin.recipes.shell import FACTS, Launch, Shell, shown

SHELLS = ("bash", "sh")
COMMAND = ("entrypoint", "image", "command")
OWN_VALUE = re.compile(  # `-e NAME=$NAME`, which is `-e NAME`
    r"(?<!\S)(?P<option>(?:-e|--env)(?:[ \t]+|=|(?=[\"\w])))(?P<all>\"?)(?P<name>[A-Za-z_]\w*)="
    r"(?P<value>\"?)\$(?:(?P=name)|\{(?P=name)(?::?-)?\})(?P=value)(?P=all)(?=\s|$)"
)
OF_COMPOSE = re.compile(r"\$\$|" + shell.VARIABLE.replace("[^${}'\\\"\\\\`]*", "[^}]*"))


def launch_of(file: Path, text: str, value: Any, environment: Mapping[str, str]) -> Launch | None:
    """value: of the file as YAML. None for what is none of these. No secret of the environment is read."""
    known = {name: value for name, value in environment.items() if not SECRET_NAME.search(name)}
    if isinstance(value, dict) and "services" in value and "command" not in value:
        return of_compose(file, value["services"], known)
    if not isinstance(value, dict) and shell.START.search(text):
        return of_script(file, text, known)
    return None


def of_script(file: Path, text: str, environment: Mapping[str, str]) -> Launch:
    text = OWN_VALUE.sub(r"\g<option>\g<name>", re.sub(r"\$\(pwd\)|\$\{?PWD\b\}?", ".", text))
    script = Shell(file, text, {name: environment[name] for name in ("HOME", "USER") if name in environment})
    launch = script.launch()
    if launch.argv[0] not in shell.ENGINES or "run" not in launch.argv:
        return launch
    words = launch.argv[launch.argv.index("run") + 1 :]
    server = of_docker(file, words, {**environment, **script.values, **launch.env})
    return replace(server, left=server.left + launch.left)


def of_docker(file: Path, words: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """An image's own entrypoint is `vllm serve`, unless the words behind it name a program."""
    rest, entrypoint, env, left = list(words), list[str](), dict[str, str](), list[str]()
    while rest and rest[0].startswith("-"):
        name, value = option_of(rest)
        if name == "--entrypoint":
            entrypoint = [value]
        elif name in ("-e", "--env"):
            variable, equals, text = value.partition("=")
            if not equals and (SECRET_NAME.search(variable) or variable not in environment):
                left.append(f"env {variable}: not set in your environment, of which no secret is read")
            else:
                env[variable] = text if equals else environment[variable]
        elif name not in FACTS["docker_unsaid"]:
            left.append(shown(f"docker run {name} {short(value)}".strip()))
    if not rest:
        raise ManifestError(file, "docker run", shown(shlex.join(words)), "an image, and the words of its server")
    image, *started = rest
    name = "".join(started[:1]).rpartition("/")[2]
    if not entrypoint and name not in (*shell.PROGRAMS, *SHELLS, *FACTS["wrappers"]):
        entrypoint = ["vllm", "serve"]
    started = [*entrypoint, *started]
    if started[0].rpartition("/")[2] in SHELLS and len(started) > 2 and re.fullmatch("-[a-z]*c", started[1]):
        launch = Shell(file, started[2], dict(env), set(env)).launch()
        return replace(launch, left=left + launch.left, image=image)
    argv, given = shell.unwrapped(started)
    return Launch(tuple(argv), env | given, left, image)


def option_of(rest: list[str]) -> tuple[str, str]:
    """The next option of `docker run`, and its value, which are taken off."""
    name, equals, value = rest.pop(0).partition("=")
    name = re.sub(r"^-[ditPq]+(?=[A-Za-z])", "-", name)  # -dp is -d -p
    is_bare = name in FACTS["docker_without_value"] or re.fullmatch(r"-[ditPq]", name)
    if re.match(r"-\w.", name):  # -eNAME=value
        return name[:2], name[2:] + equals + value
    return name, value if equals or is_bare or not rest else rest.pop(0)


def of_compose(file: Path, services: Any, environment: Mapping[str, str]) -> Launch:
    found = services if isinstance(services, dict) else {}
    known = {name: one for name, one in found.items() if isinstance(one, dict)}
    serving = [name for name, one in known.items() if "vllm" in f"{one.get('image')} {one.get('command')}"]
    if len(serving) != 1:
        raise ManifestError(file, "services", ", ".join(map(str, serving or found)), "one service that runs vLLM")
    service, key = known[serving[0]], f"services.{serving[0]}"
    rows, words, left = service.get("environment"), list[str](), list[str]()
    if isinstance(rows, dict):
        rows = [name if value is None else f"{name}={value}" for name, value in rows.items()]
    for row in rows if isinstance(rows, list) else []:
        try:
            words += ["--env", *words_of(file, f"{key}.environment", [row], environment)]
        except ManifestError as error:
            left.append(f"env {str(row).partition('=')[0]}: {error.fault}")
    parts = {name: words_of(file, f"{key}.{name}", service.get(name), environment) for name in COMMAND}
    words += ["--entrypoint", *parts["entrypoint"][:1]] if parts["entrypoint"] else []
    words += [*(parts["image"] or [""]), *parts["entrypoint"][1:], *parts["command"]]
    launch = of_docker(file, words, environment)
    left += [
        f"{key}.{name}: {short(shown(str(service[name])))}" for name in service if name not in FACTS["compose_unsaid"]
    ]
    left += [f"services.{name}: another service" for name in found if name != serving[0]]
    return replace(launch, left=launch.left + left)


def words_of(file: Path, key: str, value: Any, environment: Mapping[str, str]) -> list[str]:
    """A text or a list of Compose with its variables, of which `$$` is a dollar."""

    def filled(found: re.Match[str]) -> str:
        value = "$" if found[0] == "$$" else shell.value_of(found, environment)
        if value is None:
            raise ManifestError(file, key, shown(found[0]), shell.UNKNOWN)
        return value

    try:
        words = value if isinstance(value, list) else shlex.split(str(value or ""))
    except ValueError as error:
        raise ManifestError(file, key, shown(str(value)), f"words ({error})") from None
    return [OF_COMPOSE.sub(filled, str(word)) for word in words]

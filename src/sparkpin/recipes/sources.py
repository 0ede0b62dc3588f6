"""How else people start a server: `vllm serve`, `docker run`, a Compose file, a script that holds one of these.

Each comes to the words and variables of `vllm serve`. What a container's options said besides is listed as not carried.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpin.core.errors import ManifestError, short
from sparkpin.pins.values import ENV_NAME, SECRET_NAME
from sparkpin.pins.vllm_flags import drop_flags, flag_value
from sparkpin.recipes.shell import VARIABLE, ShellCommand, commands, shown

RUNNERS: dict[str, Any] = json.loads((Path(__file__).parent / "runners.json").read_text(encoding="utf-8"))
"""What the two runners know: keys of a recipe, settings that become flags. Read in their sources of 2026."""
MODULE = ["-m", "vllm.entrypoints.openai.api_server"]
STARTERS = ("vllm", "python", "python3")
ENGINES = ("docker", "podman")
SHELLS = ("bash", "sh")
WRAPPERS = ("exec", "nohup", "env", "nice", "ionice", "numactl", "timeout", "time", "taskset", "sudo", "uv", "stdbuf")
START = re.compile(
    rf"^[ \t]*(?:(?:{'|'.join(WRAPPERS)})[ \t]+(?:[-\d]\S*[ \t]+)*)*(?:(?:docker|podman)[ \t]+(?:container[ \t]+)?run\b"
    r"|(?:\w+=\S*[ \t]+)*(?:\S*/)?vllm[ \t]+serve\b|(?:\S*/)?python3?[ \t]+-m[ \t]+vllm\.entrypoints)",
    re.MULTILINE,
)
SETTING = re.compile(r"(?:export[ \t]+)?[A-Za-z_]\w*=|export[ \t]+[A-Za-z_]")
OWN_VALUE = re.compile(  # `-e NAME=$NAME`, which is `-e NAME`
    r"(?<!\S)(?P<option>(?:-e|--env)(?:[ \t]+|=|(?=[\"\w])))(?P<all>\"?)(?P<name>[A-Za-z_]\w*)="
    r"(?P<value>\"?)\$(?:(?P=name)|\{(?P=name)(?::?-)?\})(?P=value)(?P=all)(?=\s|$)"
)
REDIRECTED = re.compile(
    r"(?:[\d&]*[<>]+[&|]?[ \t]*(?:\"[^\"]*\"|'[^']*'|\$\([^)]*\)|[^\s;|&\"'<>])++[ \t]*)++(-[-\w]\S*)"
)
"""A redirection and a flag behind it, of which bash makes a word of the command before it."""
ALONE = re.compile(  # options of `docker run` without a value
    r"-[ditPq]+|--(?:detach|rm|init|interactive|tty|privileged|read-only|publish-all|no-healthcheck|quiet"
    r"|oom-kill-disable|sig-proxy)"
)
NOT_OF_THE_SERVER = re.compile(
    r"-[ditq]+|--(?:detach|rm|init|interactive|tty|name|gpus|runtime|restart|ipc|shm-size|ulimit|quiet)"
    r"|image|command|entrypoint|environment|container_name|restart|deploy|ipc|shm_size|ulimits|runtime|gpus|healthcheck"
)
OF_THE_IMAGE = re.compile(r"(?<=export)[ \t]+(PATH|LD_LIBRARY_PATH|PYTHONPATH)=[^\s'\";&|]*\$\{?\1\b[^\s'\";&|]*")
"""Additions to what an image sets, which is no matter of the server's words."""
OF_COMPOSE = re.compile(r"\$\$|" + VARIABLE.replace("[^${}'\\\"\\\\`]*", "[^}]*"))


@dataclass
class Launch:
    """A server that is started without a recipe."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    image: str = ""
    left: list[str] = field(default_factory=list)  # what is not carried over

    def set(self, text: str, environment: Mapping[str, str]) -> None:
        """`NAME=value`, or a NAME alone, which takes its value from the environment of who starts it."""
        name, equals, value = text.partition("=")
        if not equals and SECRET_NAME.search(name):
            self.left.append(f"env {name}: a secret of your environment, which is not read")
        elif not equals and name not in environment:
            self.left.append(f"env {name}: missing, your environment has no such variable")
        else:
            self.env[name] = value if equals else environment[name]


@dataclass
class Variables:
    """Of a shell, as far as its script is read."""

    values: dict[str, str]
    exported: set[str] = field(default_factory=set)

    def take(self, command: ShellCommand) -> bool:
        """Whether the command is one that sets variables, and nothing else."""
        first, *words = command.words or ("export",)
        pairs = [word.partition("=") for word in words]
        names = [name for name, _, _ in pairs]
        if first == "unset" and set(words) <= self.values.keys():
            for name in words:
                del self.values[name]
        elif first == "export" and all(map(ENV_NAME.fullmatch, names)):
            self.exported.update(names)
            self.values.update([*command.assigned, *((name, value) for name, equals, value in pairs if equals)])
        else:
            return first == "set"
        return True

    def told(self, command: ShellCommand) -> str:
        """For people, and a recipe's file: without the values of secrets."""
        text = shown(command)
        for name, value in [*self.values.items(), *command.assigned]:
            text = text.replace(value, f"${name}") if value and SECRET_NAME.search(name) else text
        return text

    @property
    def env(self) -> dict[str, str]:
        return {name: value for name, value in self.values.items() if name in self.exported}


@dataclass(frozen=True)
class RenderedServer:
    """How a server is started, and what else its script has."""

    argv: tuple[str, ...]
    env: dict[str, str]
    before: tuple[str, ...] = ()  # other commands
    after: tuple[str, ...] = ()  # what is never reached while it runs
    plumbing: str = ""  # pipes and redirections
    missing: tuple[str, ...] = ()  # placeholders that nothing fills (version 2)

    @property
    def left(self) -> list[str]:
        """What is not carried over."""
        before = [f"command before the server: {short(line)}" for line in self.before]
        piped = [f"pipe or redirection: {short(self.plumbing)}"] if self.plumbing else []
        return [*before, *piped, *(f"command after the server: {short(line)}" for line in self.after)]


def server_of(file: Path, text: str, shell: Variables) -> RenderedServer:
    """The command of a script that starts vLLM, or else its last.

    ManifestError for flags that the server does not get. shell: what is known before it.
    """
    before = [f"export {found[0].strip()}" for found in OF_THE_IMAGE.finditer(text)]
    found = commands(OF_THE_IMAGE.sub(" ", text) + "\n", shell.values, file)  # a script's last line ends
    words, given = list[str](), dict[str, str]()
    for one in found:
        if shell.take(one):
            continue
        if one.words[0] == "export":
            raise ManifestError(file, "command", shell.told(one), "export NAME=value: only a shell could tell the rest")
        words, given = unwrapped(one.words)
        if words[0] in ("vllm", *ENGINES) or "-m" in words:
            break
        before.append(shell.told(one))
    else:
        if not words:
            raise ManifestError(file, "command", text, "a command that starts a server")
        before.pop()
    env, after = shell.env | dict(one.assigned) | given, list[str]()
    try:  # what a script does after it has started the server need not be understood
        after += [shell.told(other) for other in found]
    except ManifestError as error:
        after.append(f"all from {short(error.got)} on")
    lost = REDIRECTED.match(one.plumbing)
    for flag in [lost[1]] if lost else [line for line in after if line.startswith("-")]:
        expected = "no flag after the end of the command: a comment, a redirection or a blank after a backslash ends it"
        raise ManifestError(file, "command", flag, expected)
    return RenderedServer(tuple(words), env, tuple(before), tuple(after), one.plumbing)


def launch_of(file: Path, text: str, value: Any, environment: Mapping[str, str]) -> Launch | None:
    """value: of the file as YAML. None for what is none of these."""
    if isinstance(value, dict) and "services" in value and "command" not in value:
        return of_compose(file, value["services"], environment)
    if not isinstance(value, dict) and (start := START.search(text)):
        return of_script(file, text[: start.start()], text[start.start() :], environment)
    return None


def of_script(file: Path, before: str, body: str, environment: Mapping[str, str]) -> Launch:
    """Of what stands before the server's line, settings alone are read: the rest may be any shell."""
    lines = [line.strip() for line in before.splitlines()]
    given = [line for line in lines if SETTING.match(line)]
    left = [line for line in lines if line and line not in given and not re.match(r"#|set\b", line)]
    shell = Variables({name: environment[name] for name in ("HOME", "USER") if name in environment})
    for one in commands("\n".join(given) + "\n", shell.values, file):
        if not shell.take(one):
            left.append(shell.told(one))
    body = OWN_VALUE.sub(r"\g<option>\g<name>", re.sub(r"\$\(pwd\)|\$\{?PWD\b\}?", ".", body))
    server = server_of(file, body, shell)
    words = list(server.argv)
    if words[0].rpartition("/")[2] in ENGINES:
        launch = of_docker(file, words[words.index("run") + 1 :], {**environment, **shell.values, **server.env})
    else:
        launch = Launch(words, server.env)
    launch.left += [*(f"command before the server: {short(line)}" for line in left), *server.left]
    return launch


def of_docker(file: Path, words: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """An image's own entrypoint is `vllm serve`, unless the words behind it name a program."""
    rest, launch, entrypoint = list(words), Launch([]), ""
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        name = re.sub(r"^-[ditPq]+(?=[A-Za-z])", "-", name)  # -dp is -d -p
        if re.match(r"-\w.", name) and not ALONE.fullmatch(name):  # -eNAME=value
            name, value = name[:2], name[2:] + equals + value
        elif not equals and not ALONE.fullmatch(name):
            value = rest.pop(0) if rest else ""
        if name in ("-e", "--env"):
            launch.set(value, environment)
        elif name == "--entrypoint":
            entrypoint = value
        elif not NOT_OF_THE_SERVER.fullmatch(name):
            launch.left.append(f"docker run {name} {short(value)}".strip())
    if not rest:
        raise ManifestError(file, "docker run", shlex.join(words), "an image, and the words of its server")
    launch.image = rest.pop(0)
    started = [entrypoint, *rest] if entrypoint else rest
    name = "".join(started[:1]).rpartition("/")[2]
    if not entrypoint and name not in (*STARTERS, *SHELLS, *WRAPPERS):
        started = ["vllm", "serve", *rest]
    if name in SHELLS and len(started) > 2 and re.fullmatch("-[a-z]*c", started[1]):
        server = server_of(file, started[2], Variables(dict(launch.env), set(launch.env)))
        launch.env, started = server.env, list(server.argv)
        launch.left += server.left
    launch.words, given = unwrapped(started)
    launch.env |= given
    return launch


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
            words += ["--env", filled(file, f"{key}.environment", row, environment)]
        except ManifestError as error:
            left.append(f"env {str(row).partition('=')[0]}: needs {error.expected}")
    image = filled(file, f"{key}.image", service.get("image") or "", environment)
    program, *entrypoint = words_of(file, f"{key}.entrypoint", service.get("entrypoint"), environment) or [""]
    command = words_of(file, f"{key}.command", service.get("command"), environment)
    words += ["--entrypoint", program] if program else []
    launch = of_docker(file, [*words, image, *entrypoint, *command], environment)
    others = [name for name in service if not NOT_OF_THE_SERVER.fullmatch(str(name))]
    left += [f"{key}.{name}: {short(service[name])}" for name in others]
    launch.left += [*left, *(f"services.{name}: another service" for name in found if name != serving[0])]
    return launch


def words_of(file: Path, key: str, value: Any, environment: Mapping[str, str]) -> list[str]:
    try:
        words = value if isinstance(value, list) else shlex.split(str(value or ""))
    except ValueError as error:
        raise ManifestError(file, key, value, f"words ({error})") from None
    return [filled(file, key, word, environment) for word in words]


def filled(file: Path, key: str, text: Any, environment: Mapping[str, str]) -> str:
    """A text of Compose with its variables, of which `$$` is a dollar."""

    def value(found: re.Match[str]) -> str:
        if not (name := found["name"] or found["braced"]):
            return "$"
        if SECRET_NAME.search(name):
            expected = f"a value without {name}: a secret of your environment is not read"
            raise ManifestError(file, key, found[0], expected)
        said = environment.get(name)
        if said is None or (not said and found["operator"] == ":-"):
            said = found["default"]
        if said is None:
            expected = f"a value of {name}: export it, or write ${{{name}:-VALUE}} in the file"
            raise ManifestError(file, key, found[0], expected)
        return said

    return OF_COMPOSE.sub(value, str(text))


def unwrapped(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words and variables of what `exec`, `nice`, `env NAME=value` and their like start; vLLM without its path."""
    words, given = list(command), dict[str, str]()
    while words[1:] and words[0].rpartition("/")[2] in WRAPPERS:
        programs = [at for at, word in enumerate(words) if at and word.rpartition("/")[2] in (*ENGINES, *STARTERS)]
        plain = [at for at, word in enumerate(words) if at and not word.startswith("-") and "=" not in word]
        at = (programs or plain or [0])[0]
        if not at or (words[1].startswith("-") and not programs):
            break
        pairs = [word.partition("=") for word in words[1:at]]
        given |= {name: value for name, equals, value in pairs if equals and ENV_NAME.fullmatch(name)}
        words = words[at:]
    if words and words[0].rpartition("/")[2] in STARTERS:
        words[0] = words[0].rpartition("/")[2]
    return words, given


def vllm_serve(argv: Sequence[str]) -> tuple[str, ...]:
    """`vllm serve MODEL ...`, where that is what the words mean: vLLM's module, the model as a flag."""
    words = list(argv)
    if words[1:3] == MODULE:
        words[:3] = ["vllm", "serve"]
    if words[:2] == ["vllm", "serve"] and (named := flag_value(words, "--model")):
        words[2:] = [named, *drop_flags(words, "--model")[2:]]
    return tuple(words)

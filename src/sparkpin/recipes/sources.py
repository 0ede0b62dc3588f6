"""How else people start a server: `vllm serve`, `docker run`, a Compose file, a script that holds one of these.

Each comes to the words and variables of `vllm serve`. What a container's options said besides is listed as not carried.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkpin.core.errors import ManifestError, short
from sparkpin.pins.values import SECRET_NAME
from sparkpin.pins.vllm_flags import drop_flags, flag_value
from sparkpin.recipes.shell import ShellCommand, commands, shown

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
FLAG_AFTER = re.compile(  # a redirection, of which bash makes a word of the command before it
    r"(?:(?:\d*(?:>>|>\||[<>]&|<<<|<>|[<>])|&>>?)[ \t]*(?:\"[^\"]*\"|'[^']*'|\$\([^)]*\)|[^\s;|&\"'])++[ \t]*)++"
    r"(?P<flag>-[-\w]\S*)"
)
ALONE = re.compile(  # options of `docker run` without a value
    r"-[ditPq]+|--(?:detach|rm|init|interactive|tty|privileged|read-only|publish-all|no-healthcheck|quiet"
    r"|oom-kill-disable|sig-proxy)"
)
NOT_OF_THE_SERVER = re.compile(
    r"-[ditq]+|--(?:detach|rm|init|interactive|tty|name|gpus|runtime|restart|ipc|shm-size|ulimit|quiet)"
    r"|image|command|entrypoint|environment|container_name|restart|deploy|ipc|shm_size|ulimits|runtime|gpus|healthcheck"
)
VARIABLE = re.compile(
    r"\$(?:\$|(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?-)(?P<default>[^}]*))?\})"
)


@dataclass
class Launch:
    words: list[str]  # of the server
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


def launch_of(file: Path, text: str, value: object, environment: Mapping[str, str]) -> Launch | None:
    """value: of the file as YAML. None for what is none of these."""
    if isinstance(value, dict) and "services" in value and "command" not in value:
        return of_compose(file, value["services"], environment)
    if not isinstance(value, dict) and (start := START.search(text)):
        return of_script(file, text[: start.start()], text[start.start() :], environment)
    return None


@dataclass
class Variables:
    """Of a shell, as far as its script is read."""

    values: dict[str, str]
    exported: set[str] = field(default_factory=set)

    def take(self, command: ShellCommand) -> bool:
        """Whether the command is one that sets variables, and nothing else."""
        if command.words and command.words[0] != "export":
            return False
        pairs = [word.partition("=") for word in command.words[1:]]
        self.exported.update(name for name, _, _ in pairs)
        self.values.update([*command.assigned, *((name, value) for name, equals, value in pairs if equals)])
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


def of_script(file: Path, before: str, body: str, environment: Mapping[str, str]) -> Launch:
    lines = [line.strip() for line in before.splitlines()]
    given = [line for line in lines if SETTING.match(line)]
    left = [before_it(line) for line in lines if line and line not in given and not re.match(r"#|set\b", line)]
    shell = Variables({name: environment[name] for name in ("HOME", "USER") if name in environment})
    for one in commands("\n".join(given) + "\n", shell.values, file):
        if not shell.take(one):
            left.append(before_it(shell.told(one)))
    body = OWN_VALUE.sub(r"\g<option>\g<name>", re.sub(r"\$\(pwd\)|\$\{?PWD\b\}?", ".", body))
    command = server_of(file, body, shell, left, lambda one: bool(one.words))
    words, own = unwrapped(command.words)
    own = dict(command.assigned) | own
    if words[0].rpartition("/")[2] not in ENGINES:
        launch = Launch(words, shell.env | own)
    else:
        launch = of_docker(file, words[words.index("run") + 1 :], {**environment, **shell.values, **own})
    launch.left += left
    return launch


def before_it(line: str) -> str:
    return f"line before the server: {short(line)}"


def server_of(
    file: Path, text: str, shell: Variables, left: list[str], is_server: Callable[[ShellCommand], bool]
) -> ShellCommand:
    """The first such command of a script; `shell` gets the variables set before it, `left` all else that is there."""
    found = commands(text + "\n", shell.values, file)
    for one in found:
        if is_server(one):
            if flag := FLAG_AFTER.match(one.plumbing):
                raise misplaced(file, flag["flag"])
            left += [f"pipe or redirection: {short(one.plumbing)}"] if one.plumbing else []
            left += after_it(file, shell, found)
            return one
        if not shell.take(one):
            left.append(before_it(shell.told(one)))
    raise ManifestError(file, "command", text, "a command that starts vLLM")


def after_it(file: Path, shell: Variables, found: Iterator[ShellCommand]) -> Iterator[str]:
    """What a script does after it has started the server need not be understood."""
    while True:
        try:
            one = next(found, None)
        except ManifestError as error:
            yield f"lines after the server: all from {short(error.got)} on"
            return
        if one is None:
            return
        if one.words and one.words[0].startswith("-"):
            raise misplaced(file, one.words[0])
        yield f"line after the server: {short(shell.told(one))}"


def misplaced(file: Path, flag: str) -> ManifestError:
    return ManifestError(file, "command", f"{flag} after a redirection", "redirections and pipes after all flags")


def of_docker(file: Path, words: Sequence[str], environment: Mapping[str, str]) -> Launch:
    rest, launch, entrypoint = list(words), Launch([]), None
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        name = re.sub(r"^-[ditPq]+(?=[A-Za-z])", "-", name)  # -dp is -d -p
        if ALONE.fullmatch(name):
            pass
        elif re.match(r"-\w.", name):  # -eNAME=value
            name, value = name[:2], name[2:] + equals + value
        elif not equals:
            value = rest.pop(0) if rest else ""
        if name in ("-e", "--env"):
            launch.set(value, environment)
        elif name == "--entrypoint":
            entrypoint = [value] if value else []
        elif not NOT_OF_THE_SERVER.fullmatch(name):
            launch.left.append(f"docker run {name} {short(value)}".strip())
    if not rest:
        raise ManifestError(file, "docker run", shlex.join(words), "an image, and the words of its server")
    launch.image = rest.pop(0)
    return started(file, launch, entrypoint, rest)


def of_compose(file: Path, services: object, environment: Mapping[str, str]) -> Launch:
    found = services if isinstance(services, dict) else {}
    serving = [
        name
        for name, one in found.items()
        if isinstance(one, dict) and "vllm" in f"{one.get('image')} {one.get('command')}"
    ]
    if len(serving) != 1:
        raise ManifestError(file, "services", ", ".join(map(str, serving or found)), "one service that runs vLLM")
    service, key = found[serving[0]], f"services.{serving[0]}"
    launch = Launch([], image=filled(file, f"{key}.image", service.get("image") or "", environment))
    said = service.get("environment") or {}
    rows = (
        [name if value is None else f"{name}={value}" for name, value in said.items()]
        if isinstance(said, dict)
        else said
    )
    for row in rows if isinstance(rows, list) else []:
        try:
            launch.set(filled(file, f"{key}.environment", row, environment), environment)
        except ManifestError as error:
            launch.left.append(f"env {str(row).partition('=')[0]}: needs {error.expected}")
    words = {
        part: words_of(file, f"{key}.{part}", service.get(part), environment) for part in ("entrypoint", "command")
    }
    launch.left += [f"{key}.{name}: {short(value)}" for name, value in service.items()
                    if not NOT_OF_THE_SERVER.fullmatch(str(name))]  # fmt: skip
    launch.left += [f"services.{name}: another service" for name in found if name != serving[0]]
    return started(file, launch, words["entrypoint"], words["command"] or [])


def words_of(file: Path, key: str, value: object, environment: Mapping[str, str]) -> list[str] | None:
    if value is None:
        return None
    try:
        words = value if isinstance(value, list) else shlex.split(str(value))
    except ValueError as error:
        raise ManifestError(file, key, value, f"words ({error})") from None
    return [filled(file, key, word, environment) for word in words]


def filled(file: Path, key: str, text: object, environment: Mapping[str, str]) -> str:
    """A text of Compose with its variables, of which `$$` is a dollar."""

    def value(found: re.Match[str]) -> str:
        if not (name := found["plain"] or found["name"]):
            return "$"
        if SECRET_NAME.search(name):
            expected = f"a value without {name}: a secret of your environment is not read"
            raise ManifestError(file, key, found[0], expected)
        said = environment.get(name)
        if said is None or (not said and found["operator"] == ":-"):
            if found["default"] is None:
                raise ManifestError(
                    file, key, found[0], f"a value of {name}: export it, or write ${{{name}:-VALUE}} in the file"
                )
            return found["default"]
        return said

    return VARIABLE.sub(value, str(text))


def started(file: Path, launch: Launch, entrypoint: list[str] | None, arguments: list[str]) -> Launch:
    """What an image starts: its own entrypoint is `vllm serve`, unless the words name a program."""
    words, name = [*(entrypoint or []), *arguments], (entrypoint or arguments or [""])[0].rpartition("/")[2]
    if entrypoint is None and name not in (*STARTERS, *SHELLS, *WRAPPERS):
        words = ["vllm", "serve", *arguments]
    if name in SHELLS and len(words) > 2 and words[1].startswith("-") and words[1].endswith("c"):
        shell = Variables(dict(launch.env), set(launch.env))
        server = server_of(file, words[2], shell, launch.left, starts_vllm)
        launch.env = shell.env | dict(server.assigned)
        words = list(server.words)
    launch.words, given = unwrapped(words)
    launch.env |= given
    return launch


def starts_vllm(command: ShellCommand) -> bool:
    return unwrapped(command.words)[0][:1] == ["vllm"] or "-m" in command.words


def unwrapped(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words and variables of what `exec`, `nice`, `env NAME=value` and their like start; vLLM without its path."""
    words, given = list(command), dict[str, str]()
    while words[1:] and (name := words[0].rpartition("/")[2]) in WRAPPERS:
        places = [
            at for at, word in enumerate(words) if at and word.rpartition("/")[2] in (*ENGINES, *STARTERS, *WRAPPERS)
        ]
        plain = [at for at, word in enumerate(words) if at and not word.startswith("-") and "=" not in word]
        at = (places or plain or [0])[0]
        if not at or (words[1].startswith("-") and not places):
            break
        pairs = [word.partition("=") for word in words[1:at] if name == "env" and "=" in word]
        given |= {variable: value for variable, _, value in pairs}
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

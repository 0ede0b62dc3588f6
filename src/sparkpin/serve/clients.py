"""How a server is asked: a line to try, variables for a shell, and the tools that `invoke client` writes for, from
clients.yaml; and what a client has to know, from the server's command line and what is known of the model."""

from __future__ import annotations

import functools
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.pins.reading import read_yaml
from sparkpin.pins.schema import Family
from sparkpin.pins.vllm_flags import AUTO, Flags, served_name
from sparkpin.serve.address import key_path, signs_itself
from sparkpin.serve.served import Served

SHARE = 4  # of the context that an answer may take at most: vLLM refuses a request whose prompt then no longer fits
OUTPUT = 16384  # tokens, where nothing is known of the model
NEXT = ("invoke status", "invoke logs", "invoke stop")


@dataclass(frozen=True)
class ServerFacts:
    """url: base of the OpenAI endpoint, without a slash at its end; model: its name in requests.

    context, output: tokens; input: kinds of a message's parts. key: variable of the environment that holds the API
    key, or, for lines of a shell of this machine, key_file: the file that has it; "" for a server that asks for none.
    label: what a person calls it; cert: file of its certificate, where clients have to be told to trust it.
    """

    url: str
    model: str
    label: str
    context: int
    output: int
    input: tuple[str, ...]
    tools: bool
    reasoning: bool
    key: str = ""
    key_file: str = ""
    cert: str = ""


def facts_of(
    argv: Sequence[str],
    family: Family | None,
    *,
    url: str,
    label: str,
    origin: str,
    context: int | None = None,
    **more: str,
) -> ServerFacts:
    """Of a `vllm serve` command line.

    context: what a running server says, which goes before all else. origin: whose command line it is, for errors.
    more: further fields of ServerFacts.

    Raises:
        InputError: nobody knows how long a request may be.
        ManifestError: a flag's value cannot be read.
    """
    flags = Flags(argv, origin, {})
    length = flags.number("--max-model-len", auto=True)
    length = context or (length if length != AUTO else None) or (family.context if family else None)
    if length is None:
        raise InputError(
            f"{origin}: no --max-model-len, and pins/families.yaml has no family for its model",
            next_step="start it first (invoke serve), or add the model's family",
        )
    tools = flags.on("--enable-auto-tool-choice") and flags.text("--tool-call-parser") is not None
    return ServerFacts(
        url=base_of(url),
        model=served_name(argv),
        label=label,
        context=length,
        output=max(1, min(family.output if family else OUTPUT, length // SHARE)),
        input=inputs_of(flags, family),
        tools=tools,
        reasoning=flags.text("--reasoning-parser") is not None,
        **more,
    )


def inputs_of(flags: Flags, family: Family | None) -> tuple[str, ...]:
    """The model's own, less what the server was told not to take."""
    limits = flags.json("--limit-mm-per-prompt")
    kinds = family.input if family else ["text"]
    if flags.on("--language-model-only"):
        return tuple(kind for kind in kinds if kind == "text")
    return tuple(kind for kind in kinds if limits.get(kind) != 0)


def base_of(url: str) -> str:
    """With the path /v1 where none is given."""
    try:
        parts = urlsplit(url)
    except ValueError:  # such as a bracket of an IPv6 address that is not closed
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InputError(
            f"--url: got {url!r}, expected an endpoint's base", next_step="for example --url http://spark.local:8000/v1"
        )
    return url.rstrip("/") if parts.path.strip("/") else f"{url.rstrip('/')}/v1"


@dataclass(frozen=True)
class Client:
    """An entry of clients.yaml, which has its fields."""

    use: str
    template: str
    file: str = ""
    program: str = ""
    prompt: int = 0
    trust: str = "SSL_CERT_FILE"

    def write(self, facts: ServerFacts) -> str:
        from jinja2 import Environment, StrictUndefined  # here: `serve` asks for `found_here` alone
        from markupsafe import Markup

        def quoted(value: object) -> object:
            if isinstance(value, Markup):
                return value
            return json.dumps(value, ensure_ascii=False) if self.file else shlex.quote(str(value))

        # The libraries require a key even where the server does not.
        secret = Markup(f'"${facts.key}"') if facts.key else "not-needed"
        if facts.key_file:
            secret = Markup(f'"$(cat {shlex.quote(facts.key_file)})"')
        values = asdict(facts) | {
            "images": "image" in facts.input,
            "host": facts.url.removesuffix("/v1"),
            "secret": secret,
        }
        jinja = Environment(undefined=StrictUndefined, trim_blocks=True, finalize=quoted)
        return jinja.from_string(self.template).render(values).strip()


def found_here() -> list[str]:
    """Names of the tools on this machine's PATH."""
    return [name for name, client in clients().items() if client.program and shutil.which(client.program)]


@functools.cache
def clients() -> dict[str, Client]:
    data = read_yaml(Path(__file__).with_name("clients.yaml"))
    return {name: Client(**values) for name, values in data.items()}


def how_to_ask(paths: Paths, served: Served, context: int | None = None, *, scripted: bool = False) -> list[str]:
    """Lines for a server that answers. context: tokens; scripted: its answers are a script."""
    found = [f"{served.release} answers at {served.url}" + (f", {context} tokens of context" if context else "")]
    if scripted:
        found.append(f"the model {served.model} is scripted: its answers are a script, and show the path alone")
    if not served.address.is_local:
        found.append(f"other machines reach it; the key that it requires is in {key_path(paths, served.recipe)}")
    tools = [f"invoke client {name}" for name in found_here()]
    return [*found, f"try it: {curl_line(paths, served)}", f"next: {', '.join([*tools, *NEXT])}"]


def curl_line(paths: Paths, served: Served) -> str:
    """For a shell of this machine. The key comes by a pipe: `ps` shows curl's arguments to every user."""
    body = json.dumps({"model": served.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60})
    words = ["curl", "-H 'Content-Type: application/json'", "-d", shlex.quote(body)]  # --json: not in Ubuntu 22.04
    if signs_itself(served.address.cert):
        words += ["--cacert", shlex.quote(served.address.cert)]
    line = " ".join([*words, f"{served.url}/chat/completions"])
    if served.address.is_local:
        return line
    file = shlex.quote(str(key_path(paths, served.recipe)))
    return f"""printf 'Authorization: Bearer %s' "$(cat {file})" | {line} -H @-"""

"""How a person's own programs ask a server: a line to try, variables for a shell."""

from __future__ import annotations

import json
import shlex
import subprocess

from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show
from sparkpin.host.engine import Engine
from sparkpin.serve import keys
from sparkpin.serve.served import Served, describe
from sparkpin.serve.status import service_of

NEXT = ("invoke status", "invoke logs", "invoke stop")


def how_to_ask(paths: Paths, served: Served, context: int | None = None, *, scripted: bool = False) -> list[str]:
    """Lines for a server that answers. context: tokens; scripted: its answers are a script."""
    from sparkpin.serve.clients import found_here  # slow to import

    found = [f"{served.release} answers at {served.url}" + (f", {context} tokens of context" if context else "")]
    if scripted:
        found.append(f"the model {served.model} is scripted: its answers are a script, and show the path alone")
    if served.key:
        found.append(f"other machines reach it; the key that it requires is in {keys.path_of(paths, served.recipe)}")
    clients = [f"invoke client {name}" for name in found_here()]
    return [*found, f"try it: {curl_line(paths, served)}", f"next: {', '.join([*clients, *NEXT])}"]


def curl_line(paths: Paths, served: Served) -> str:
    """For a shell of this machine. The key comes by a pipe: `ps` shows curl's arguments to every user."""
    body = json.dumps({"model": served.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60})
    words = ["curl", "-H 'Content-Type: application/json'", "-d", shlex.quote(body)]  # --json: not in Ubuntu 22.04
    if signs_itself(served.cert):
        words += ["--cacert", shlex.quote(served.cert)]
    line = " ".join([*words, f"{served.url}/chat/completions"])
    if not served.key:
        return line
    file = shlex.quote(str(keys.path_of(paths, served.recipe)))
    return f"""printf 'Authorization: Bearer %s' "$(cat {file})" | {line} -H @-"""


def signs_itself(cert: str) -> bool:
    """Whether clients have to be told to trust it. cert: "" for none."""
    asked = ["openssl", "verify", "-CAfile", cert, cert]
    return bool(cert) and subprocess.run(asked, capture_output=True).returncode == 0


def show_env(paths: Paths, engine: Engine, recipe: str | None) -> None:
    """Lines for `eval "$(...)"`, with the key: for a shell, and no file."""
    served = describe(engine, service_of(paths, engine, recipe))
    path = keys.path_of(paths, served.recipe)
    if served.key and not path.is_file():
        raise InputError(
            f"{served.recipe} requires a key, and {path} is not there", next_step="invoke serve makes another one"
        )
    key = path.read_text(encoding="utf-8").strip() if served.key else "not-needed"  # the libraries require one
    variables = {"OPENAI_BASE_URL": served.url, "OPENAI_API_KEY": key, "OPENAI_MODEL": served.model}
    if signs_itself(served.cert):
        variables["SSL_CERT_FILE"] = served.cert
    for name, value in variables.items():
        show(f"export {name}={shlex.quote(value)}")

"""The tools that `invoke client` writes for, from clients.yaml."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkpin.pins.reading import read_yaml
from sparkpin.serve.client_facts import ServerFacts


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

        # The libraries want a key even where the server does not.
        secret = Markup(f'"${facts.key}"') if facts.key else "not-needed"
        values = asdict(facts) | {"images": facts.images, "host": facts.url.removesuffix("/v1"), "secret": secret}
        jinja = Environment(undefined=StrictUndefined, trim_blocks=True, finalize=quoted)
        return jinja.from_string(self.template).render(values).strip()

    def too_long_for(self, facts: ServerFacts) -> bool:
        """vLLM refuses a request whose prompt and `max_tokens` do not fit together."""
        return self.prompt + facts.output > facts.context


def found_here() -> list[str]:
    """Names of the tools on this machine's PATH."""
    return [name for name, client in CLIENTS.items() if client.program and shutil.which(client.program)]


DATA = read_yaml(Path(__file__).with_name("clients.yaml"))
CLIENTS = {name: Client(**values) for name, values in DATA.items()}

"""The tools that `invoke client` writes for: a row and a template each. docs/clients.md: how each is known to work."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import asdict, dataclass

from sparkpin.serve.client_facts import ServerFacts


@dataclass(frozen=True)
class Client:
    """file: what the configuration belongs into; "" for lines of a shell. use: the line after that. program: the tool,
    on PATH; "" for none.

    template: its values are written as JSON, which YAML and TOML take as it is; in lines of a shell, quoted for it.

    prompt: tokens of its own instructions and tools, in each request; 0 where they are few, or not known.
    trust: what names the file of a certificate that no authority signed.
    """

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


CLIENTS = {
    "claude": Client(
        use=". <(invoke client claude) && claude",
        program="claude",
        prompt=19_000,
        trust="NODE_EXTRA_CA_CERTS",
        template="""
unset ANTHROPIC_API_KEY  # it would be sent beside the other, and the server wants each key that it sees to be right
export ANTHROPIC_BASE_URL={{ host }}
export ANTHROPIC_AUTH_TOKEN={{ secret }}
export ANTHROPIC_MODEL={{ model }}
export ANTHROPIC_DEFAULT_OPUS_MODEL={{ model }}
export ANTHROPIC_DEFAULT_SONNET_MODEL={{ model }}
export ANTHROPIC_DEFAULT_HAIKU_MODEL={{ model }}  # the small one, for titles and summaries
export CLAUDE_CODE_MAX_CONTEXT_TOKENS={{ context }}
export CLAUDE_CODE_MAX_OUTPUT_TOKENS={{ output }}
export CLAUDE_CODE_ATTRIBUTION_HEADER=0  # else a line that changes comes before all that is cached
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
""",
    ),
    "cline": Client(
        use=". <(invoke client cline) && cline",
        program="cline",
        prompt=5_300,
        trust="NODE_EXTRA_CA_CERTS",
        template="""
# This writes ~/.cline/data/settings/providers.json, with the key in it.
cline auth --provider openai-compatible --baseurl {{ url }} --modelid {{ model }} --apikey {{ secret }}
# By hand there, beside "model": "contextWindow": {{ context }}, "maxTokens": {{ output }}
# In an editor's window instead: API Provider OpenAI Compatible; Base URL, Model ID and API Key as above;
# Context Window Size {{ context }}; Max Output Tokens {{ output }}; Supports Images {{ "yes" if images else "no" }}
""",
    ),
    "codex": Client(
        use="codex",
        program="codex",
        file="~/.codex/config.toml",
        prompt=8_600,
        template="""
model = {{ model }}
model_provider = "sparkpin"
model_context_window = {{ context }}

[model_providers.sparkpin]
name = "sparkpin"
base_url = {{ url }}
wire_api = "responses"
{% if key %}
env_key = {{ key }}
{% endif %}
""",
    ),
    "continue": Client(
        use="restart the editor",
        program="cn",
        file="~/.continue/config.yaml",
        trust="caBundlePath, under requestOptions of the model",
        template="""
name: sparkpin
version: 1.0.0
schema: v1
models:
  - name: {{ label }}
    provider: vllm
    model: {{ model }}
    apiBase: {{ url }}
    apiKey: {{ "${{ secrets." ~ key ~ " }}" if key else secret }}
    roles: [chat, edit, apply]
    capabilities: {{ (["tool_use"] if tools else []) + (["image_input"] if images else []) }}
    defaultCompletionOptions: {contextLength: {{ context }}, maxTokens: {{ output }}}
""",
    ),
    "litellm": Client(
        use="LITELLM_MASTER_KEY=sk-$(openssl rand -hex 24) litellm --config config.yaml",
        program="litellm",
        file="config.yaml",
        template="""
model_list:
  - model_name: {{ model }}
    litellm_params:
      model: {{ "hosted_vllm/" ~ model }}
      api_base: {{ url }}
      api_key: {{ "os.environ/" ~ key if key else secret }}
    model_info:
      mode: chat
      max_input_tokens: {{ context }}
      max_output_tokens: {{ output }}
      supports_function_calling: {{ tools }}
      supports_reasoning: {{ reasoning }}
      supports_vision: {{ images }}
      input_cost_per_token: 0
      output_cost_per_token: 0
general_settings:
  master_key: os.environ/LITELLM_MASTER_KEY
""",
    ),
    "llm": Client(
        use="llm -m MODEL 'a question'",
        program="llm",
        file="~/.config/io.datasette.llm/extra-openai-models.yaml",
        template="""
- model_id: {{ model }}
  model_name: {{ model }}
  api_base: {{ url }}
{% if key %}
  api_key_name: {{ key }}  # that is stored: llm keys set {{ key }}
{% endif %}
  supports_schema: true
  supports_tools: {{ tools }}
  vision: {{ images }}
""",
    ),
    "open-webui": Client(
        use=". <(invoke client open-webui) && open-webui serve",
        program="open-webui",
        trust="AIOHTTP_CLIENT_SSL_CERT_FILE",
        template="""
# Read at the first start; later ones go by what is stored, unless ENABLE_PERSISTENT_CONFIG=False.
export OPENAI_API_BASE_URLS={{ url }}  # more servers: after a semicolon, here and in the next line
export OPENAI_API_KEYS={{ secret }}
export DEFAULT_MODELS={{ model }}
export ENABLE_OLLAMA_API=False
""",
    ),
    "openai": Client(
        use=". <(invoke client openai)",
        template="""
# {{ context }} tokens of context, of which max_tokens should take {{ output }} or less
# messages: {{ input | join(",") }}; tool calls: {{ "yes" if tools else "no" }}
# reasoning, in a field of its own: {{ "yes" if reasoning else "no" }}
export OPENAI_BASE_URL={{ url }}
export OPENAI_API_KEY={{ secret }}
export OPENAI_MODEL={{ model }}  # for the requests' `model`; not read by the libraries
""",
    ),
    "opencode": Client(
        use="opencode",
        program="opencode",
        file="~/.config/opencode/opencode.json",
        prompt=7_200,
        trust="NODE_EXTRA_CA_CERTS",
        template="""
{
  "$schema": "https://opencode.ai/config.json",
  "model": {{ "sparkpin/" ~ model }},
  "provider": {
    "sparkpin": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "sparkpin",
      "options": {"baseURL": {{ url }}, "apiKey": {{ "{env:%s}" % key if key else secret }}},
      "models": {
        {{ model }}: {
          "name": {{ label }},
          "tool_call": {{ tools }},
          "reasoning": {{ reasoning }},
          "attachment": {{ images }},
          "temperature": true,
          "limit": {"context": {{ context }}, "output": {{ output }}},
          "modalities": {"input": {{ input | list }}, "output": ["text"]}
        }
      }
    }
  }
}
""",
    ),
}
"""Continue's format has no word for reasoning: `reasoning` there is an option of other providers' requests."""

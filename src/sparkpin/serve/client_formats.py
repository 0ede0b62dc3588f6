"""The facts as each tool wants them. Pure; tests/data/clients has what is checked of each format, and its source."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sparkpin.serve.client_facts import ServerFacts

PROVIDER = "sparkpin"
PROXY_KEY = "LITELLM_MASTER_KEY"
NO_KEY = "not-needed"  # the libraries want one even where the server does not


def opencode(facts: ServerFacts) -> str:
    """opencode.json, in the project or in ~/.config/opencode."""
    model: dict[str, Any] = {
        "name": facts.label,
        "tool_call": facts.tools,
        "reasoning": facts.reasoning,
        "attachment": facts.images,
        "temperature": True,
        "limit": {"context": facts.context, "output": facts.output},
        "modalities": {"input": list(facts.input), "output": ["text"]},
    }
    key = f"{{env:{facts.key}}}" if facts.key else NO_KEY
    value = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"{PROVIDER}/{facts.model}",
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {"baseURL": facts.url, "apiKey": key},
                "models": {facts.model: model},
            }
        },
    }
    return json.dumps(value, indent=2, ensure_ascii=False)


def openai(facts: ServerFacts) -> str:
    """Lines for a shell: OpenAI's libraries read the first two variables."""
    yes = {True: "yes", False: "no"}
    key = f'"${facts.key}"' if facts.key else NO_KEY
    return "\n".join(
        (
            f"# {facts.context} tokens of context, of which max_tokens should take {facts.output} or less",
            f"# messages: {', '.join(facts.input)}; tool calls: {yes[facts.tools]}; "
            f"reasoning, in a field of its own: {yes[facts.reasoning]}",
            f"export OPENAI_BASE_URL={shlex.quote(facts.url)}",
            f"export OPENAI_API_KEY={key}",
            f"export OPENAI_MODEL={shlex.quote(facts.model)}  # for the requests' `model`; not read by the libraries",
        )
    )


def continue_(facts: ServerFacts) -> str:
    """~/.continue/config.yaml. Its `reasoning` is an option of other providers' requests: left out."""
    capable = [name for name, there in (("tool_use", facts.tools), ("image_input", facts.images)) if there]
    model = {
        "name": facts.label,
        "provider": "vllm",
        "model": facts.model,
        "apiBase": facts.url,
        "apiKey": f"${{{{ secrets.{facts.key} }}}}" if facts.key else NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": capable,
        "defaultCompletionOptions": {"contextLength": facts.context, "maxTokens": facts.output},
    }
    return "\n".join(yaml_lines({"name": PROVIDER, "version": "1.0.0", "schema": "v1", "models": [model]}))


def litellm(facts: ServerFacts) -> str:
    """config.yaml of its proxy, which passes requests on. Without a key for its own clients it does not start, or, in
    older versions, serves everybody who reaches it."""
    deployment = {
        "model_name": facts.model,
        "litellm_params": {
            "model": f"hosted_vllm/{facts.model}",
            "api_base": facts.url,
            "api_key": f"os.environ/{facts.key}" if facts.key else NO_KEY,
        },
        "model_info": {
            "mode": "chat",
            "max_input_tokens": facts.context,
            "max_output_tokens": facts.output,
            "supports_function_calling": facts.tools,
            "supports_reasoning": facts.reasoning,
            "supports_vision": facts.images,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        },
    }
    value = {"model_list": [deployment], "general_settings": {"master_key": f"os.environ/{PROXY_KEY}"}}
    return "\n".join((f"# {PROXY_KEY}=sk-$(openssl rand -hex 24) litellm --config FILE", *yaml_lines(value)))


FORMATS: Mapping[str, Callable[[ServerFacts], str]] = {
    "opencode": opencode,
    "openai": openai,
    "continue": continue_,
    "litellm": litellm,
}


def yaml_lines(value: Any, indent: str = "") -> Iterator[str]:
    """Block style for mappings and lists of mappings; every other value as JSON, which YAML takes as it is."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield f"{indent}{key}:"
            yield from yaml_lines(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], Mapping):
            yield f"{indent}{key}:"
            for entry in item:
                first, *rest = yaml_lines(entry, indent + "    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        else:
            yield f"{indent}{key}: {json.dumps(item, ensure_ascii=False)}"

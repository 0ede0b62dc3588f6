"""`invoke client`: each configuration against a schema, and what it says against the command line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from client_samples import BARE, FULL, URL
from places import DATA, PROJECT

from sparkpin.commands import client
from sparkpin.core.errors import InputError
from sparkpin.pins import manifests
from sparkpin.pins.families import family_of
from sparkpin.pins.schema import Family
from sparkpin.serve import client_formats
from sparkpin.serve.client_facts import ServerFacts, base_of, facts_of

SCHEMAS = DATA / "clients"


def qwen() -> Family:
    return Family(name="q", models=["*/q-*"], context=262144, output=32768, input=["text", "image"])


def said(*flags: str, family: Family | None = None, **more: Any) -> ServerFacts:
    argv = ["vllm", "serve", "/model", "--served-model-name", "m", *flags]
    return facts_of(argv, family, url=URL, label="r", origin="recipes/r.yaml", **more)


def checked(tool: str, text: str) -> Any:
    """The configuration as the tool reads it, after a schema said that it may."""
    value = json.loads(text) if tool == "opencode" else yaml.safe_load(text)
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{tool}.json").read_text())).validate(value)
    return value


def test_opencode() -> None:
    value = checked("opencode", client_formats.opencode(FULL))
    assert value["model"] == "sparkpin/qwen/qwen3.5"
    provider = value["provider"]["sparkpin"]
    assert provider["options"] == {"baseURL": URL, "apiKey": "not-needed"}
    assert provider["models"] == {
        "qwen/qwen3.5": {
            "name": "all day",
            "tool_call": True,
            "reasoning": True,
            "attachment": True,
            "temperature": True,
            "limit": {"context": 196608, "output": 32768},
            "modalities": {"input": ["text", "image"], "output": ["text"]},
        }
    }
    (model,) = checked("opencode", client_formats.opencode(BARE))["provider"]["sparkpin"]["models"].values()
    assert not (model["tool_call"] or model["reasoning"] or model["attachment"])
    assert '"apiKey": "{env:SPARK_KEY}"' in client_formats.opencode(BARE)


def test_continue() -> None:
    (model,) = checked("continue", client_formats.continue_(FULL))["models"]
    assert model["apiBase"] == URL and model["model"] == "qwen/qwen3.5"
    assert model["capabilities"] == ["tool_use", "image_input"]
    assert model["defaultCompletionOptions"] == {"contextLength": 196608, "maxTokens": 32768}
    (bare,) = checked("continue", client_formats.continue_(BARE))["models"]
    assert bare["capabilities"] == [] and (bare["model"], bare["name"]) == ("tiny: #1", "it's")
    assert bare["apiKey"] == "${{ secrets.SPARK_KEY }}"


def test_litellm() -> None:
    (entry,) = checked("litellm", client_formats.litellm(FULL))["model_list"]
    assert entry["litellm_params"]["model"] == "hosted_vllm/qwen/qwen3.5"
    info = entry["model_info"]
    assert (info["max_input_tokens"], info["max_output_tokens"]) == (196608, 32768)
    assert info["supports_function_calling"] and info["supports_reasoning"] and info["supports_vision"]
    (bare,) = checked("litellm", client_formats.litellm(BARE))["model_list"]
    assert bare["litellm_params"]["api_key"] == "os.environ/SPARK_KEY"
    assert not any(bare["model_info"][f"supports_{what}"] for what in ("function_calling", "reasoning", "vision"))
    first, *_ = client_formats.litellm(BARE).splitlines()
    assert first == "# LITELLM_MASTER_KEY=sk-$(openssl rand -hex 24) litellm --config FILE"


def test_what_the_schema_does_not_know_is_noticed() -> None:
    """So that the schemas are not passed by anything."""
    value = json.loads(client_formats.opencode(FULL))
    value["provider"]["sparkpin"]["models"]["qwen/qwen3.5"]["tools"] = True
    with pytest.raises(jsonschema.ValidationError):
        checked("opencode", json.dumps(value))


@pytest.mark.parametrize("facts", [FULL, BARE], ids=["full", "bare"])
def test_openai_is_lines_for_a_shell(facts: ServerFacts) -> None:
    script = f'{client_formats.openai(facts)}\nprintf "%s\\n" "$OPENAI_BASE_URL" "$OPENAI_API_KEY" "$OPENAI_MODEL"'
    env = {"PATH": os.environ["PATH"], "SPARK_KEY": "a secret"}
    out = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [facts.url, "a secret" if facts.key else "not-needed", facts.model]


def test_limits() -> None:
    assert (said("--max-model-len", "2048").context, said("--max-model-len", "2048").output) == (2048, 512)
    assert said("--max-model-len", "196608", family=qwen()).output == 32768
    assert said("--max-model-len", "196608").output == 16384, "nothing is known of the model"
    assert said("--max-model-len", "auto", family=qwen()).context == 262144
    assert said("--max-model-len", "auto", family=qwen(), context=98304).context == 98304, "as the server says"
    assert said("--max-model-len", "128K").context == 131072
    assert said("--max-model-len", "3").output == 1
    with pytest.raises(InputError, match="no --max-model-len"):
        said()


def test_tool_calls_and_reasoning_are_what_the_flags_allow() -> None:
    parsers = ("--max-model-len", "2048", "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder")
    assert not said(*parsers).tools, "vLLM refuses tools without --enable-auto-tool-choice"
    assert said(*parsers).reasoning and not said("--max-model-len", "2048").reasoning
    assert said(*parsers, "--enable-auto-tool-choice").tools
    assert not said(*parsers, "--enable-auto-tool-choice", "--no-enable-auto-tool-choice").tools


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ((), ("text", "image")),
        (("--limit-mm-per-prompt", '{"image": 0}'), ("text",)),
        (("--limit-mm-per-prompt", '{"image": 4, "video": 0}'), ("text", "image")),
        (("--limit-mm-per-prompt.image", "0"), ("text",)),
        (("--language-model-only",), ("text",)),
    ],
)
def test_images_only_where_the_server_takes_them(flags: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    assert said("--max-model-len", "2048", *flags, family=qwen()).input == wanted


def test_base_of_an_endpoint() -> None:
    assert base_of("http://spark.local:8000") == "http://spark.local:8000/v1"
    assert base_of("http://spark.local:8000/") == "http://spark.local:8000/v1"
    assert base_of("https://a/llm/v1/") == "https://a/llm/v1"
    for wrong in ("spark.local:8000", "ftp://a", "http://", "http://a/v1?x=1"):
        with pytest.raises(InputError, match="wanted an endpoint's base"):
            base_of(wrong)


@pytest.fixture
def no_engine(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.setenv("SPARKPIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(project)
    return project


def test_of_a_recipe_that_does_not_run(no_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client.client("opencode", recipe="scripted-tiny", url="", key="")
    value = checked("opencode", capsys.readouterr().out)
    provider = value["provider"]["sparkpin"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:8000/v1"
    model = provider["models"]["scripted-tiny"]
    assert model["limit"] == {"context": 2048, "output": 512} and model["tool_call"] and model["reasoning"]
    client.client("litellm", recipe="scripted-tiny", url="http://spark.local:9000", key="KEY")
    (entry,) = checked("litellm", capsys.readouterr().out)["model_list"]
    assert entry["litellm_params"]["api_base"] == "http://spark.local:9000/v1"


def test_unknown_tools_and_keys_are_refused(no_engine: Path) -> None:
    with pytest.raises(InputError, match="no tool 'curl'") as caught:
        client.client("curl", recipe=None, url="", key="")
    assert caught.value.next_step == "choose one of: opencode, openai, continue, litellm"
    with pytest.raises(InputError, match="--key-env: saw 'sk-123'"):
        client.client("openai", recipe=None, url="", key="sk-123")


def test_every_recipe_has_a_family() -> None:
    project = PROJECT
    families = manifests.load_families(project)
    for file in (project / "recipes").glob("*.yaml"):
        assert family_of(families, manifests.load_recipe(project, file.stem).model), file.name

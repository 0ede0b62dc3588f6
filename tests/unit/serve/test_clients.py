"""`invoke client`: each configuration against a schema, and what it says against the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from client_samples import BARE, FULL, URL
from made_releases import release
from places import DATA, PROJECT

from sparkpin.cli import serve as task
from sparkpin.cli.line import TaskParser
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests
from sparkpin.pins.schema import Family
from sparkpin.pins.vllm_command import family_of
from sparkpin.serve.address import Address, key_path
from sparkpin.serve.clients import ServerFacts, base_of, clients, facts_of, found_here
from sparkpin.serve.served import Served

PATHS = Paths(PROJECT, Path("cache"), Path("home"))

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


def written(tool: str, facts: ServerFacts) -> Any:
    return checked(tool, clients()[tool].write(facts))


def sourced(tool: str, facts: ServerFacts, **env: str) -> dict[str, str]:
    """The variables that its lines leave in a shell."""
    lines = f"{clients()[tool].write(facts)}\nenv -0"
    env = {"PATH": os.environ["PATH"], "SPARK_KEY": "a secret", **env}
    out = subprocess.run(["sh", "-c", lines], env=env, capture_output=True, text=True, check=True).stdout
    return dict(entry.split("=", 1) for entry in out.rstrip("\0").split("\0"))


def test_opencode() -> None:
    value = written("opencode", FULL)
    assert value["model"] == "sparkpin/qwen/qwen3.5"
    provider = value["provider"]["sparkpin"]
    assert provider["options"] == {"baseURL": URL, "apiKey": "not-needed"}
    model = provider["models"]["qwen/qwen3.5"]
    assert model["tool_call"] and model["reasoning"] and model["attachment"]
    assert model["limit"] == {"context": 196608, "output": 32768} and model["modalities"]["input"] == ["text", "image"]
    (model,) = written("opencode", BARE)["provider"]["sparkpin"]["models"].values()
    assert not (model["tool_call"] or model["reasoning"] or model["attachment"])
    assert written("opencode", BARE)["provider"]["sparkpin"]["options"]["apiKey"] == "{env:SPARK_KEY}"


def test_continue() -> None:
    (model,) = written("continue", FULL)["models"]
    assert model["apiBase"] == URL and model["model"] == "qwen/qwen3.5"
    assert model["capabilities"] == ["tool_use", "image_input"]
    assert model["defaultCompletionOptions"] == {"contextLength": 196608, "maxTokens": 32768}
    (bare,) = written("continue", BARE)["models"]
    assert bare["capabilities"] == [] and bare["apiKey"] == "${{ secrets.SPARK_KEY }}"


def test_litellm() -> None:
    (entry,) = written("litellm", FULL)["model_list"]
    assert entry["litellm_params"]["model"] == "hosted_vllm/qwen/qwen3.5"
    info = entry["model_info"]
    assert (info["max_input_tokens"], info["max_output_tokens"]) == (196608, 32768)
    assert info["supports_function_calling"] and info["supports_reasoning"] and info["supports_vision"]
    (bare,) = written("litellm", BARE)["model_list"]
    assert bare["litellm_params"]["api_key"] == "os.environ/SPARK_KEY"
    assert not any(bare["model_info"][f"supports_{what}"] for what in ("function_calling", "reasoning", "vision"))


def test_what_the_schema_does_not_know_is_noticed() -> None:
    """So that the schemas are not passed by anything."""
    value = json.loads(clients()["opencode"].write(FULL))
    value["provider"]["sparkpin"]["models"]["qwen/qwen3.5"]["tools"] = True
    with pytest.raises(jsonschema.ValidationError):
        checked("opencode", json.dumps(value))


def test_llm() -> None:
    (model,) = written("llm", FULL)
    assert (model["model_name"], model["api_base"]) == ("qwen/qwen3.5", URL)
    assert model["supports_schema"] and model["supports_tools"] and model["vision"]
    (bare,) = written("llm", BARE)
    assert (bare["model_id"], bare["api_key_name"]) == ("tiny: #1", "SPARK_KEY")
    assert not (bare["supports_tools"] or bare["vision"])


def test_codex() -> None:
    value = tomllib.loads(clients()["codex"].write(BARE))
    provider = value["model_providers"][value["model_provider"]]
    assert (value["model"], value["model_context_window"]) == ("tiny: #1", 2048)
    assert (provider["base_url"], provider["env_key"]) == ("https://spark.local/v1", "SPARK_KEY")
    assert "env_key" not in tomllib.loads(clients()["codex"].write(FULL))["model_providers"]["sparkpin"]


@pytest.mark.parametrize("facts", [FULL, BARE], ids=["full", "bare"])
def test_lines_for_a_shell(facts: ServerFacts) -> None:
    key = "a secret" if facts.key else "not-needed"
    openai = sourced("openai", facts)
    assert (openai["OPENAI_BASE_URL"], openai["OPENAI_API_KEY"]) == (facts.url, key)
    assert openai["OPENAI_MODEL"] == facts.model
    webui = sourced("open-webui", facts)
    assert (webui["OPENAI_API_BASE_URLS"], webui["OPENAI_API_KEYS"]) == (facts.url, key)
    claude = sourced("claude", facts, ANTHROPIC_API_KEY="of another")
    assert "ANTHROPIC_API_KEY" not in claude, "the proxy refuses two keys of which one is wrong"
    assert claude["ANTHROPIC_BASE_URL"] == facts.url.removesuffix("/v1") and claude["ANTHROPIC_AUTH_TOKEN"] == key
    models = {value for name, value in claude.items() if name.startswith("ANTHROPIC_") and name.endswith("MODEL")}
    assert models == {facts.model}, "it asks for no model that is not served"
    assert int(claude["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == facts.output, "its own 32,000 are refused by small contexts"


@pytest.mark.parametrize("tool", ["openai", "open-webui", "claude"])
def test_lines_for_a_shell_of_this_machine_take_the_key_from_its_file(tool: str, tmp_path: Path) -> None:
    file = tmp_path / "ke y"
    file.write_text("the key\n")
    found = sourced(tool, dataclasses.replace(FULL, key_file=str(file), cert="/a cert.pem"))
    assert "the key" in found.values() and "not-needed" not in found.values()
    assert found.get("SSL_CERT_FILE") == ("/a cert.pem" if tool == "openai" else None)


@pytest.mark.parametrize(("tool", "url"), [("openai", ""), ("openai", "http://spark:8000"), ("opencode", "")])
def test_a_server_s_key_is_never_called_needless(
    tool: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In lines for a shell of this machine it comes from its file, else from a variable."""
    paths, address = Paths(PROJECT, tmp_path / "cache", tmp_path / "home"), Address(host="0.0.0.0")
    server: Any = SimpleNamespace(name="c", status="running")
    found = Served(str(paths.home), "smollm2", "sparkpin/r:v2-1", "m", address, server, None)
    made = dataclasses.replace(release(1), argv=("vllm", "serve", "/model", "--max-model-len", "2048"))
    for place, name, value in (
        (task, "engine_of", None),
        (task, "service_of", None),
        (task.served, "describe", found),
        (task, "context_of", None),
        (task.Releases, "get", made),
    ):
        monkeypatch.setattr(place, name, lambda *_, value=value: value)
    file = key_path(paths, "smollm2")
    file.parent.mkdir(parents=True)
    file.write_text("the key\n")
    task.client(paths, tool, url=url)  # type: ignore[arg-type]
    printed = capsys.readouterr()
    is_here = tool == "openai" and not url
    assert "not-needed" not in printed.out
    assert (f"$(cat {file})" in printed.out) == is_here == ("SPARKPIN_API_KEY" not in printed.out)
    assert is_here == (f"export SPARKPIN_API_KEY=$(cat {file})" not in printed.err)


def test_cline(tmp_path: Path) -> None:
    """With a stand-in that prints what it was given: the real one was asked by hand."""
    (tmp_path / "cline").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$GIVEN"\n')
    (tmp_path / "cline").chmod(0o755)
    sourced("cline", BARE, PATH=f"{tmp_path}:{os.environ['PATH']}", GIVEN=str(tmp_path / "given"))
    given = (tmp_path / "given").read_text().splitlines()
    assert given[:1] == ["auth"] and dict(zip(given[1::2], given[2::2], strict=True)) == {
        "--provider": "openai-compatible",
        "--baseurl": BARE.url,
        "--modelid": BARE.model,
        "--apikey": "a secret",
    }


def test_tools_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("opencode", "llm"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found_here() == ["llm", "opencode"]
    task.client(PATHS)
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert names[:2] == ["llm", "opencode"] and sorted(names) == sorted(clients())


def test_the_task_names_them_all() -> None:
    """Its words are written out: completion and usage load no module."""
    (tool, *_) = TaskParser("sparkpin", "client").arguments
    assert tool.choices == list(clients())


def test_limits() -> None:
    assert (said("--max-model-len", "2048").context, said("--max-model-len", "2048").output) == (2048, 512)
    assert said("--max-model-len", "196608", family=qwen()).output == 32768
    assert said("--max-model-len", "196608").output == 16384, "nothing is known of the model"
    assert said("--max-model-len", "auto", family=qwen()).context == 262144
    assert said("--max-model-len", "auto", family=qwen(), context=98304).context == 98304, "as the server says"
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
        (("--language-model-only",), ("text",)),
    ],
)
def test_images_only_where_the_server_takes_them(flags: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    assert said("--max-model-len", "2048", *flags, family=qwen()).input == wanted


def test_what_is_printed_for_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[object] = []

    def found(paths: object, *words: object, **options: object) -> ServerFacts:
        asked.extend((*words, options))
        return said("--max-model-len", "2048")

    monkeypatch.setattr(task, "facts_of_server", found)
    task.client(PATHS, "opencode", recipe="scripted-tiny", url="http://spark.local:9000", key_env="KEY")
    assert asked == ["scripted-tiny", {"url": "http://spark.local:9000", "key": "KEY", "in_file": True}]
    printed = capsys.readouterr()
    assert checked("opencode", printed.out)["provider"]["sparkpin"]["options"]["baseURL"] == URL
    assert "warning: a context of 2,048 tokens" in printed.err


def test_a_key_is_not_taken_for_the_name_of_a_variable() -> None:
    with pytest.raises(InputError):
        task.client(PATHS, "openai", key_env="sk-123")


@pytest.mark.parametrize("url", ["spark.local", "http://[::1", "ftp://spark.local", "http://spark.local/v1?key=x"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        base_of(url)


def test_every_recipe_has_a_family() -> None:
    project = PROJECT
    families = manifests.load_families(project)
    for file in (project / "recipes").glob("*.yaml"):
        assert family_of(families, manifests.load_recipe(project, file.stem).model), file.name

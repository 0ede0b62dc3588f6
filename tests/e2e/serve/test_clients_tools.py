"""`invoke client`: what it prints, given to the tools themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from client_samples import BARE, FULL
from client_tools import CONTINUE, continue_reads, events, node, opencode
from fake_vllm import Handler, TcpServer, serving

from benchmarks.scripted_tiny.scripts import ANSWER, TOOL
from sparkpin.serve.clients import ServerFacts, clients

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("facts", [FULL, BARE], ids=["full", "bare"])
def test_opencode_takes_each_word_as_it_is_meant(facts: ServerFacts, tmp_path: Path) -> None:
    """It passes over words that it does not know, so what it understood is asked, not only whether it complains."""
    said = opencode(tmp_path, clients()["opencode"].write(facts), "models", "sparkpin", "--verbose")
    name, _, described = said.partition("\n")
    assert name == f"sparkpin/{facts.model}"
    model = json.loads(described)
    assert (model["name"], model["limit"]) == (facts.label, {"context": facts.context, "output": facts.output})
    able = model["capabilities"]
    wanted = (facts.tools, facts.reasoning, "image" in facts.input)
    assert (able["toolcall"], able["reasoning"], able["attachment"]) == wanted
    assert {kind for kind, there in able["input"].items() if there} == set(facts.input)
    assert {kind for kind, there in able["output"].items() if there} == {"text"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that gives vLLM's recorded answers to those who have the key."""
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    with TcpServer(("127.0.0.1", 0), Handler) as server, serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"


def test_opencode_calls_a_tool_and_has_a_key(recorded: str, tmp_path: Path) -> None:
    facts = ServerFacts(recorded, "scripted-tiny", "tiny", 8192, 2048, ("text",), True, True, key="SPARK_KEY")
    config = clients()["opencode"].write(facts)
    ask = ("run", "--agent", "brief", "--format", "json", "What is the weather in Ankara?")
    parts = events(opencode(tmp_path, config, *ask, env={"SPARK_KEY": "a secret"}))
    ((called, arguments),) = TOOL.calls
    (used,) = [part for part in parts if part["type"] == "tool"]
    assert (used["tool"], used["state"]["input"]) == (called, arguments)
    assert used["state"]["output"] == "sunny in Ankara"
    assert [part["text"].strip() for part in parts if part["type"] == "text"] == [ANSWER.content]


@pytest.mark.parametrize("facts", [FULL, BARE], ids=["full", "bare"])
def test_continue_s_own_schema_keeps_every_word(facts: ServerFacts) -> None:
    """It drops words that it does not know."""
    text = clients()["continue"].write(facts)
    parsed, checked = continue_reads(text)
    assert parsed == yaml.safe_load(text)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    less = text.replace("roles:", "rolls:")
    assert "rolls" not in continue_reads(less)[0]["models"][0]
    assert node([str(CONTINUE), "/dev/stdin"], text.replace("provider:", "supplier:")).returncode == 1

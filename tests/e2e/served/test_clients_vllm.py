"""The server of the session, asked by the clients that `invoke client` writes for, and by some that go away."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_tools import claude, events, llm, opencode
from cpu_stages import Service
from watched import until

from benchmarks.scripted_tiny.scripts import ANSWER, CHAT, TOOL, WEATHER_TOOL
from sparkpin.host.engine import Engine
from sparkpin.serve.served import PROXY, Served
from sparkpin.smoke.metrics import total

RECIPE, CLIENTS = "scripted-tiny", 20
ASK = f"""
import json, os, openai
name = arguments = thought = ""
asked = openai.OpenAI().chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[{{"role": "user", "content": "What is the weather?"}}],
    tools=[{WEATHER_TOOL!r}], temperature=0, stream=True)
for choice in (choice for chunk in asked for choice in chunk.choices):
    thought += getattr(choice.delta, "reasoning", None) or ""
    for call in choice.delta.tool_calls or ():
        name += call.function.name or ""
        arguments += call.function.arguments or ""
print(json.dumps([name, json.loads(arguments), thought]))
"""
ASK_MESSAGES = f"""
import anthropic, json, os
client = anthropic.Anthropic(api_key=None)
tool = {WEATHER_TOOL["function"]!r}
tool["input_schema"] = tool.pop("parameters")
more = dict(model=os.environ["ANTHROPIC_MODEL"], max_tokens=500)
asked = [{{"role": "user", "content": "What is the weather?"}}]
counted = client.messages.count_tokens(model=more["model"], messages=asked, tools=[tool]).input_tokens
whole = client.messages.create(messages=asked, tools=[tool], **more)
with client.messages.stream(messages=asked, tools=[tool], **more) as stream:
    parts = stream.get_final_message()
use = parts.content[-1]
asked += [{{"role": "assistant", "content": [part.model_dump() for part in parts.content]}}]
asked += [{{"role": "user", "content": [{{"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}}]}}]
answer = client.messages.create(messages=asked, tools=[tool], **more)
kinds = [[part.type for part in message.content] for message in (whole, parts, answer)]
print(json.dumps([
    kinds, counted == whole.usage.input_tokens, whole.stop_reason, parts.stop_reason, parts.content[0].thinking,
    [[part.name, part.input] for part in (whole.content[-1], use)], answer.content[-1].text,
]))
"""


@pytest.fixture(scope="module")
def served(server: Service) -> Served:
    return server.at()


def run_in_image(server: Service, tool: str, program: str) -> Any:
    """What a program prints that uses a library of the image, in a shell with the lines of `invoke client`."""
    shell = server.done("client", tool, "--url", "http://127.0.0.1:8000")  # as from inside
    proxy = Engine.connect().client.containers.get(f"{server.container.name}{PROXY}")
    done = proxy.exec_run(["sh", "-c", f'{shell}\npython -c "$ASK"'], environment={"ASK": program})
    assert done.exit_code == 0, done.output.decode()
    return json.loads(done.output.splitlines()[-1])


def test_openai_s_library_calls_a_tool_in_a_stream(server: Service, served: Served) -> None:
    ((name, arguments),) = TOOL.calls
    assert run_in_image(server, "openai", ASK) == [name, arguments, TOOL.reasoning]


def test_anthropic_s_library_counts_streams_and_calls_a_tool(server: Service, served: Served) -> None:
    kinds, counted, *stopped, thought, calls, text = run_in_image(server, "claude", ASK_MESSAGES)
    ((name, arguments),) = TOOL.calls
    assert kinds == [["thinking", "tool_use"], ["thinking", "tool_use"], ["thinking", "text"]]
    assert counted and stopped == ["tool_use", "tool_use"] and thought == TOOL.reasoning
    assert calls == [[name, arguments]] * 2 and text == ANSWER.expected_content


@pytest.mark.slow
def test_opencode_calls_a_tool(server: Service, served: Served, tmp_path: Path) -> None:
    ((name, arguments),) = TOOL.calls
    config = server.done("client", "opencode")
    parts = events(opencode(tmp_path, config, "run", "--agent", "brief", "--format", "json", "What is the weather?"))
    (used,) = [part for part in parts if part["type"] == "tool"]
    assert (used["tool"], used["state"]["input"]) == (name, arguments)
    assert [part["text"].strip() for part in parts if part["type"] == "text"] == [ANSWER.content]


@pytest.mark.slow
def test_claude_code_calls_a_tool_and_answers(server: Service, served: Served, tmp_path: Path) -> None:
    """The scripted model knows one tool's name, and that is not the one that Claude Code gives an MCP server's. So what
    comes back is its own word that there is none."""
    messages = claude(tmp_path, server.done("client", "claude"), "What is the weather?")
    said = [part for message in messages if message["type"] == "assistant" for part in message["message"]["content"]]
    ((name, arguments),) = TOOL.calls
    assert [(p["name"], p["input"]) for p in said if p["type"] == "tool_use"] == [(name, arguments)]
    assert [p["thinking"] for p in said if p["type"] == "thinking"] == [TOOL.reasoning, ANSWER.reasoning]
    assert (messages[-1]["subtype"], messages[-1]["result"]) == ("success", ANSWER.expected_content)


@pytest.mark.slow
def test_llm_calls_a_function(server: Service, served: Served, tmp_path: Path) -> None:
    config = server.done("client", "llm")
    weather = "def get_weather(city: str, unit: str):\n    return f'sunny in {city}, {unit}'"
    ask = ("-m", "scripted-tiny", "--functions", weather, "What is the weather?")
    assert llm(tmp_path, config, *ask).strip() == (ANSWER.expected_content or "").strip()


def test_clients_that_go_away_leave_the_server_as_it_was(server: Service, served: Served) -> None:
    body = {"model": RECIPE, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}

    def cancel(_: int) -> None:
        with httpx.Client(trust_env=False, timeout=300) as client:
            request = body | {"stream": True, "max_tokens": 500, "ignore_eos": True}
            with client.stream("POST", f"{served.url}/chat/completions", json=request) as reply:
                next(reply.iter_lines())

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(cancel, range(CLIENTS)))
    container = server.container

    def under_way() -> float | None:
        metrics = httpx.get(f"http://127.0.0.1:{served.address.port}/metrics", trust_env=False, timeout=300).text
        return total(metrics, "vllm:num_requests_running")

    until(lambda: under_way() == 0)
    answer = httpx.post(f"{served.url}/chat/completions", json=body, trust_env=False, timeout=300).json()
    assert answer["choices"][0]["message"]["content"] == CHAT.expected_content
    assert container.attrs["RestartCount"] == 0
    lines = server.done("logs", "--lines", "3").splitlines()
    assert len(lines) == 3 and not [line for line in lines if "/metrics" in line], "without the health check's"

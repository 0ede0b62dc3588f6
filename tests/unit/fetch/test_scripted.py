"""The scripted models of pins/models: their archives hold what the pins name, and their template chooses the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from checkout import PROJECT

from benchmarks.scripted_tiny.network import FORMS
from benchmarks.scripted_tiny.repositories import SEED, generate
from sparkpin.core.errors import IntegrityError
from sparkpin.fetch.packed import commit_of, config_ahead, unpack
from sparkpin.pins import manifests
from sparkpin.smoke import scripts
from sparkpin.smoke.scripts import trigger


@pytest.mark.parametrize("name", FORMS)
def test_an_archive_holds_the_pinned_commits(name: str, tmp_path: Path) -> None:
    pin = manifests.load_model(PROJECT, name)
    assert pin.packed
    unpack(PROJECT, name, pin.packed, pin.repositories, tmp_path)
    assert {one.repo: commit_of(tmp_path / one.repo) for one in pin.repositories.values()} == {
        one.repo: one.revision for one in pin.repositories.values()
    }
    base = pin.repositories[pin.base].repo
    assert config_ahead(PROJECT, name, pin.packed, base)["num_hidden_layers"] == FORMS[name].layers


def test_the_generator_still_makes_them(tmp_path: Path) -> None:
    generate(tmp_path, seed=SEED)
    pin = manifests.load_model(PROJECT, "scripted-tiny")
    assert all(commit_of(tmp_path / one.repo) == one.revision for one in pin.repositories.values())


def test_another_archive_is_refused(tmp_path: Path) -> None:
    pin = manifests.load_model(PROJECT, "scripted-eagle3")
    assert pin.packed
    path = tmp_path / pin.packed.path
    path.parent.mkdir(parents=True)
    path.write_bytes((PROJECT / pin.packed.path).read_bytes() + b"other bytes")
    with pytest.raises(IntegrityError):
        unpack(tmp_path, pin.name, pin.packed, pin.repositories, tmp_path / "out")
    assert not (tmp_path / "out").exists()


USER = {"role": "user", "content": "Hi"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Ankara"}}}
]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "1", "content": "21"}


@pytest.mark.parametrize(
    ("messages", "tools", "mode"),
    [
        ([{"role": "user", "content": "long"}, {"role": "assistant", "content": "x"}, USER], None, "chat"),
        ([{"role": "user", "content": "Ask for BOTH"}], [scripts.WEATHER_TOOL], "calls"),
        ([{"role": "user", "content": "Call it while you think"}], [scripts.WEATHER_TOOL], "inside"),
        ([USER, CALLED, RESULT], [scripts.WEATHER_TOOL], "answer"),
        ([USER, CALLED, RESULT, {"role": "assistant", "content": "x"}, USER], [scripts.WEATHER_TOOL], "tool"),
    ],
)
def test_template_chooses_the_script(messages: list[Any], tools: list[Any] | None, mode: str) -> None:
    # The environment that transformers renders chat templates in.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((PROJECT / "benchmarks/scripted_tiny/chat_template.jinja").read_text())
    arguments = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    assert template.render(**arguments).endswith(f"<|im_start|>assistant\n<think>\n{trigger(mode)}")
    assert template.render(**arguments, enable_thinking=False).endswith(f"</think>\n\n{trigger(mode, direct=True)}")

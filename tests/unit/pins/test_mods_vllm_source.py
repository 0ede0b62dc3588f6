"""The mods' declarations of what they touch in vLLM, against the source of each release: no vLLM, no torch needed.

mods/modkit/sparkpin_modkit/vllm_source.json holds what was read from the releases' source distributions. With
SPARKPIN_VLLM_SOURCES set to a folder that holds them as vllm-RELEASE/vllm, the same is read from there too.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path

import pytest
from checkout import PROJECT

sys.path.append(str(PROJECT / "mods/modkit/tests"))

import vllm_source

DATA = json.loads(vllm_source.DATA.read_text())
DECLARED = vllm_source.declarations()
RELEASES = ("0.32.0", "0.33.0")
ACCEPTED = [(mod, release) for mod, touches in DECLARED.items() for release in touches]
SOURCES = os.environ.get("SPARKPIN_VLLM_SOURCES")


def test_the_data_is_of_these_releases_and_names_and_of_every_mod_that_declares_something() -> None:
    assert set(vllm_source.MODULES) == {path.parts[-3] for path in PROJECT.glob("mods/*/sparkpin_*/touches.py")}
    releases, names = vllm_source.releases_and_names()
    assert releases == sorted(DATA) == sorted(RELEASES)
    assert all(sorted(DATA[release]) == names for release in releases)


@pytest.mark.parametrize(("mod", "release"), ACCEPTED)
def test_an_accepted_release_has_what_the_mod_touches(mod: str, release: str) -> None:
    for name, parameters in DECLARED[mod][release].items():
        found = DATA[release][name]
        assert found is not None, f"vLLM {release} has no {name}"
        if parameters is not None and parameters.startswith("("):
            (by_place, by_name), taken = call_of(parameters), found["parameters"].split(", ")
            assert taken[: len(by_place)] == by_place and by_name <= set(taken), name
        elif parameters is not None:
            assert found["parameters"] == parameters, name


def call_of(declared: str) -> tuple[list[str], set[str]]:
    """Names by place and by name of a declared call."""
    by_place, _, by_name = declared.strip("()").partition("*")
    places, names = ([part.strip() for part in text.split(",") if part.strip()] for text in (by_place, by_name))
    return places, set(names)


def test_the_table_of_each_readme_names_each_release() -> None:
    for mod, touches in DECLARED.items():
        if mod != "modkit":
            readme = (PROJECT / "mods" / mod / "README.md").read_text()
            for release in RELEASES:
                assert f"| {release} | {'yes' if release in touches else 'no'} |" in readme, f"{mod}: {release}"


class Uses(ast.NodeVisitor):
    """What a module takes from vLLM: names (also as attributes of imported names), and those called or replaced."""

    def __init__(self) -> None:
        self.imported: dict[str, str] = {}
        self.names: set[str] = set()
        self.called: set[str] = set()
        self.calls: list[tuple[str, int, set[str]]] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "vllm":
                assert alias.name == "vllm" and alias.asname is None, f"line {node.lineno}: import names from modules"
                self.imported["vllm"] = "vllm"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] == "vllm":
            for alias in node.names:
                self.imported[alias.asname or alias.name] = f"{node.module}:{alias.name}"
                self.names.add(f"{node.module}:{alias.name}")

    def name_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.imported.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.imported:
            owner = self.imported[node.value.id]
            return f"{owner}{'.' if ':' in owner else ':'}{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.name_of(node)
        if name:
            self.names.add(name)
            if isinstance(node.ctx, ast.Store):
                self.called.add(name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.name_of(node.func)
        if name:
            self.called.add(name)
            self.calls.append((name, len(node.args), {keyword.arg or "**" for keyword in node.keywords}))
        self.generic_visit(node)


# What is not declared as it stands in the code, and what stands for it.
SAME = {
    # The platform is an instance; its class is chosen at run time.
    "vllm.platforms:current_platform.is_cpu": "vllm.platforms.interface:Platform.is_cpu",
    "vllm.platforms:current_platform.is_cuda": "vllm.platforms.interface:Platform.is_cuda",
    "vllm.platforms:current_platform.device_type": "vllm.platforms.interface:Platform.device_type",
}
UNQUANTISED = {
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod": "it has no __init__: called without arguments"
}


@pytest.mark.parametrize("mod", DECLARED)
def test_all_that_a_mod_takes_from_vllm_is_declared(mod: str) -> None:
    declared = {name: parameters for touches in DECLARED[mod].values() for name, parameters in touches.items()}
    taken = 0
    paths = {*(PROJECT / "mods" / mod).glob("sparkpin_*/*.py")}
    for path in paths - {*(PROJECT / "mods" / mod).glob("sparkpin_*/testing.py")}:  # for tests that run in an image
        uses = Uses()
        uses.visit(ast.parse(path.read_text()))
        for name in uses.names:
            name = SAME.get(name, name)
            assert any(known == name or known.startswith(f"{name}.") for known in declared), f"{path.name}: {name}"
        for name in uses.called - UNQUANTISED.keys():
            assert declared.get(SAME.get(name, name)) is not None, f"{path.name} calls or replaces {name}"
        for name, by_place, by_name in uses.calls:
            call = declared.get(SAME.get(name, name)) or ""
            if call.startswith("("):
                places, names = call_of(call)
                assert by_place <= len(places) and by_name <= names | set(places), f"{path.name} calls {name}"
        taken += len(uses.names)
    assert taken or mod == "guard", "which imports nothing: the app hands it the engine's configuration"


if SOURCES:  # not a skip: in CI, where the sources are not, there is nothing to be told about

    @pytest.mark.parametrize("release", RELEASES)
    def test_the_sources_say_what_the_data_says(release: str) -> None:
        assert vllm_source.extract(Path(str(SOURCES)) / f"vllm-{release}") == DATA[release]

"""Mods that recipes of the community name: none is run; chat templates go into images, and into keys and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_images
import yaml
from chat_templates import add_template
from places import PROJECT

from sparkpin.build.pair import pair
from sparkpin.build.render import require_closed
from sparkpin.cli import developer
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.pins import manifests
from sparkpin.pins.mods import in_workspace, to_fetch
from sparkpin.pins.vllm_flags import flag_value

RECIPE = "recipes/scripted-tiny.yaml"


def name_in_recipe(project: Path, *mods: str) -> None:
    file = project / RECIPE
    lines = [line for line in file.read_text().splitlines() if not line.startswith("mods:")]
    tiny_images.write(file, "\n".join([*lines, f"mods: {json.dumps(mods)}", ""]))


def serve_with(project: Path, template: str) -> None:
    file = project / RECIPE
    file.write_text(file.read_text().rstrip() + f" \\\n    --chat-template {template}\n")


def test_a_recipe_has_its_templates_in_every_image(project: Path) -> None:
    plain = [one.rendered for one in pair(project, "scripted-tiny")]
    add_template(project, "fix-one")
    add_template(project, "fix-two")
    serve_with(project, "fix-two.jinja")
    name_in_recipe(project, "mods/Fix-One", "fix-two")
    *_, last = made = pair(project, "scripted-tiny")
    images = [one.rendered for one in made]
    assert last.argv[last.argv.index("--chat-template") + 1] == "/workspace/fix-two.jinja"
    assert [name for name, _ in images[0].layers][-2:] == ["fix-one", "fix-two"]
    assert images[0].layers[:-2] == plain[0].layers, "what lies below is shared with recipes that have none"
    assert [image.layers for image in images[1:]] != [image.layers for image in plain[1:]]
    assert "fix-one" not in images[1].dockerfile and {one.key for one in images}.isdisjoint(old.key for old in plain)
    context = [file.path for image in images for file in image.context if file.path.startswith("templates/")]
    assert context == ["templates/fix-one/fix-one.jinja", "templates/fix-two/fix-two.jinja"]
    assert {manifests.COMMUNITY_MODS, "pins/chat_templates/fix-one.jinja"} <= set(last.inputs)
    for image in images:
        require_closed(image.dockerfile, image.parent_ref)
    assert developer.hadolint(PROJECT, {f"{image.stage}.Dockerfile": image.dockerfile for image in images}) == []


def test_a_path_in_a_command_is_found_in_the_images() -> None:
    for words, path in (("--chat_template ./b.jinja", "/workspace/b.jinja"), ("--chat-template=/x.jinja", "/x.jinja")):
        assert flag_value(in_workspace(words.split()), "--chat-template") == path
    assert in_workspace(["--port", "1"]) == ["--port", "1"]


@pytest.mark.parametrize(
    "mods",
    [
        ["mods/nothing"],  # nobody knows it
        ["fix-qwen3.5-autoround"],  # needless
        ["gpu-mem-util-gb"],  # refused
        ["fix-own", "mods/fix-own"],
    ],
)
def test_what_is_no_template_is_refused(project: Path, mods: list[str]) -> None:
    add_template(project)
    name_in_recipe(project, *mods)
    with pytest.raises(ManifestError) as caught:
        pair(project, "scripted-tiny")
    assert (caught.value.file, caught.value.key) == (RECIPE, "mods")


def test_a_template_that_nobody_has_fetched_comes_with_the_command(project: Path) -> None:
    name_in_recipe(project, "fix-qwen3.6-chat-template")
    with pytest.raises(ManifestError) as caught:
        pair(project, "scripted-tiny")
    assert [caught.value.next_step] == to_fetch(project, ["mods/fix-qwen3.6-chat-template"])


def test_a_template_that_changed_is_another(project: Path) -> None:
    serve_with(project, "own.jinja")
    name_in_recipe(project, "own")
    found = []
    for text in ("{{ 1 }}\n", "{{ 2 }}\n"):
        add_template(project, "own", text)
        found.append(pair(project, "scripted-tiny")[-1])
    was, now = found
    assert now.key != was.key and now.rendered.key != was.rendered.key
    name = "pins/chat_templates/own.jinja"
    assert was.inputs[name] != now.inputs[name], "which `diff` compares"
    (project / "pins/chat_templates/own.jinja").write_text("{{ 3 }}\n")
    with pytest.raises(IntegrityError):
        pair(project, "scripted-tiny")


@pytest.mark.parametrize(
    "change",
    [
        {"needless": ">=0.3"},  # a template, too
        {"template": None},  # of no kind
        {"needless": "nonsense >", "template": None},
        {"template": {"name": "../x.jinja", "sha256": "0" * 64, "licence": "MIT", "mends": ["x"]}},
        {"template": {"name": "x.jinja", "licence": "MIT", "mends": ["x"]}, "evidence": []},  # no hash
    ],
)
def test_an_entry_is_of_one_kind_and_says_why(project: Path, change: dict[str, Any]) -> None:
    add_template(project)
    path = project / manifests.COMMUNITY_MODS
    mods = yaml.safe_load(path.read_text())["mods"]
    assert len(mods) == len(manifests.load_community_mods(project)), "each has a name of its own"
    mods[-1] |= change
    path.write_text(yaml.safe_dump({"mods": mods}))
    with pytest.raises(ManifestError):
        manifests.load_community_mods(project)

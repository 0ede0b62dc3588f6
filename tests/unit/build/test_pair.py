"""Recipes for several nodes: what of them is in the release's key, and what is refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from places import PROJECT, copied_to

from sparkpin.build.pair import pair, require_model_fits
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.pins.nodes import nodes_of

OWN = "scripted-tiny"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pairing follows from the project's files alone."""
    monkeypatch.delattr(Paths, "from_env")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return copied_to(tmp_path / "project")


def write(project: Path, recipe: str = "scripted-pair", **more: Any) -> str:
    value = yaml.safe_load((project / f"recipes/{recipe}.yaml").read_text()) | more
    value["name"] = "own"
    (project / "recipes/own.yaml").write_text(yaml.safe_dump(value))
    return "own"


def test_the_number_of_nodes_changes_the_release_and_no_image() -> None:
    two, one = pair(PROJECT, "scripted-pair"), pair(PROJECT, OWN)
    assert [nodes_of(pairing.argv) for pairing in two] == [2] * len(two)
    assert [pairing.rendered.key for pairing in two] == [pairing.rendered.key for pairing in one]
    assert not {pairing.key for pairing in two} & {pairing.key for pairing in one}


def test_a_number_alone_is_enough(project: Path) -> None:
    said = pair(project, "scripted-pair", stage="base")[-1]
    command = said.recipe.command.replace("  --tensor-parallel-size {tensor_parallel} \\\n", "")
    assert command != said.recipe.command
    made = pair(project, write(project, command=command), stage="base")[-1]
    assert sorted(made.argv) == sorted(said.argv)


@pytest.mark.parametrize(
    ("more", "got"),
    [
        ({"nodes": 9}, 9),
        ({"nodes": 4}, "--tensor-parallel-size 2, --pipeline-parallel-size 1 for 4 nodes"),
        ({"nodes": 3, "defaults": {"tensor_parallel": 3}}, "KV heads (2) over 3"),
    ],
)
def test_what_does_not_divide_is_refused(project: Path, more: dict[str, Any], got: object) -> None:
    defaults = yaml.safe_load((project / "recipes/scripted-pair.yaml").read_text())["defaults"]
    more = more | {"defaults": defaults | more.get("defaults", {})}
    paths = Paths(project, project / "cache", project / "home")
    with pytest.raises(ManifestError) as caught:
        require_model_fits(paths, pair(project, write(project, **more))[-1])
    assert caught.value.got == got

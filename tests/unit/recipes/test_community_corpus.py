"""The corpus of the community's recipes: the words that each server gets, reviewed by hand, and real bash as a witness.

Others' recipes are no part of the repository: they are read beside it, in ../shared/corpus/recipes, where they are.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from places import PROJECT

from sparkpin.recipes import recipe, render

CORPUS = PROJECT.parent / "shared/corpus/recipes"
GOLDEN = PROJECT / "tests/data/community_argv.json"


def golden() -> dict[str, Any]:
    """name -> argv as written, and as on one machine (null: that runner refuses), both one flag a line; env."""
    value = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


def flat(lines: list[list[str]]) -> tuple[str, ...]:
    return tuple(word for line in lines for word in line)


if CORPUS.is_dir():  # a clone alone has none of them

    @pytest.mark.parametrize("name", sorted(golden()))
    def test_a_recipe_renders_to_the_reviewed_words(name: str) -> None:
        read, wanted = recipe.load(CORPUS / name), golden()[name]
        made = render.render(read)
        assert made.argv == flat(wanted["argv"])
        assert made.env == wanted["env"]
        assert (made.left, made.missing) == ([], ())
        assert (wanted["alone"] is None) == (read.least == 2)
        if wanted["alone"] is not None:
            assert render.render(read, single=True).argv == flat(wanted["alone"])

    @pytest.mark.parametrize("path", sorted(CORPUS.glob("*.yaml")), ids=lambda path: path.stem[-50:])
    def test_bash_makes_the_same_words(path: Path, tmp_path: Path) -> None:
        read = recipe.load(path)
        servers = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\"; exit; }}\n" for name in ("vllm", "sglang"))
        script = f"{servers}{render.script_of(read)}\n"
        done = subprocess.run(
            ["bash", "--norc", "--restricted"], input=script, env=dict(read.env), cwd=tmp_path, capture_output=True,
            text=True,
        )  # fmt: skip
        assert (tuple(done.stdout.split("\0")[:-1]), done.stderr) == (render.render(read).argv, "")

    def test_every_recipe_of_the_corpus_has_a_golden() -> None:
        assert {path.name for path in CORPUS.glob("*.yaml")} == set(golden())

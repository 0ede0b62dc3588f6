"""The public recipes: each for one machine passes, or is refused for a reason; and sparkrun's own renderer as witness.

Others' recipes are no part of the repository: they are read beside it, in ../shared/corpus, where they are.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from client_tools import sparkrun
from places import PROJECT

from sparkpin.cli import add
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.pins.manifests import load_community_mods
from sparkpin.pins.mods import mod_of
from sparkpin.recipes import check, recipe, render
from sparkpin.recipes.adopt import Adopted, take_mods
from sparkpin.recipes.shell import Shell

CORPUS = [path for name in ("recipes", "public") for path in (PROJECT.parent / "shared/corpus" / name).glob("*.yaml")]
FOLDER, PATCHED, POOLED, PLUGIN = "a repository of the Hub", "has no flag --mxfp4-", "/v1/embeddings", "parser-plugin"
REFUSED = {  # how the name ends -> how its errors begin; all others that are for one machine pass
    "recipes-laguna-s-2.1": FOLDER,
    "recipes-qwen3.5-27b-opus-v2-fp8": "enable_flashinfer_autotune",
    "openai-gpt-oss-120b-vllm": PATCHED,  # a fork's flags
    "recipes-4x-spark-cluster-qwen3.5-397b-int4-autoround": "its weights are",
    "recipes-4x-spark-cluster-qwen3.5-397b-a17B-fp8": "its weights are",
    "recipes-nemotron-3-nano-nvfp4": PLUGIN,
    "vllm-nemotron-3-nano-nvfp4-vllm": PLUGIN,
    "recipes-nomic-embed-v2-moe": POOLED,
    "vl-embedding-8b-vllm": POOLED,
    "vl-reranker-8b-vllm": POOLED,
}
KINDS = {  # what becomes of a mod that public recipes name: all there are, but for those that nobody here knows
    "template": {"diffusiongemma", "fix-qwen3.5-chat-template", "fix-qwen3.6-chat-template"},
    "needless": {"fix-qwen3.5-autoround"},
    "refused": {"fix-qwen3-coder-next", "fix-qwen3-next-autoround", "fix-qwen35-tp4-marlin", "gpu-mem-util-gb",
                "nemotron-nano", "step-3.7-flash"},
    "unknown": {"instanttensor-hybrid-draft-loader", "minimax-m3-reasoning-stream", "minimax-m3-swigluoai",
                "minimax-m3-topk-buffer-layout"},
}  # fmt: skip
V2 = {
    "plain-json": {"command": """vllm serve {model} --port {port} --x '{"a":{"b":{port}}}'""", "defaults": {"port": 1}},
    "doubled": {"command": """vllm serve {model} --x '{{"a":{{"b":{port}}}}}'""", "defaults": {"port": 1}},
    "nested": {
        "command": "vllm serve {model} {more} --served-model-name a b",
        "defaults": {"more": "--max-num-seqs {n}", "n": 2},
    },
    "blanks": {"command": "vllm serve {model} \\  \n  --port {port} \\\t\n  --host h\n", "defaults": {"port": 1}},
    "served-name": {"command": "vllm serve {model} --port 1", "defaults": {"served_model_name": "x"}},
    "no-command": {
        "defaults": {"port": 8000, "tensor_parallel": 1, "gpu_memory_utilization": 0.7, "max_model_len": 9, "odd": 1},
    },
    "env": {"command": "vllm serve {model}", "env": {"A": 1, "B": "x y"}},
}  # fmt: skip


def imported(paths: Paths, path: Path) -> object:
    """Whether it can be taken over, and its errors; why not, where it is refused."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            add.add(paths, str(path), dry_run=True, no_lock=True)
    except SparkpinError as error:
        return type(error)
    return [line for line in told.getvalue().splitlines() if line.startswith("  error: ")]


def words_of(command: str, env: dict[str, str]) -> list[str]:
    shell = Shell("r.yaml", command, dict(env))
    next(shell.commands())
    return shell.read().words


def compared(paths: list[Path]) -> list[tuple[str, Any, Any]]:
    """(name, what sparkrun says, what is read here), where these differ."""
    differ = []
    for path, (command, env) in zip(paths, sparkrun(*paths), strict=True):
        read = recipe.load(path)
        made = render.render(read)
        theirs = words_of(command, env)
        if "--served-model-name" not in made.argv and theirs[-2:] == ["--served-model-name", read.model]:
            theirs = theirs[:-2]  # what vLLM takes where the flag is missing
        order = list if read.command else sorted  # sparkrun has an order of its own for settings without a command
        if (order(theirs), env) != (order(made.argv), made.env):
            differ.append((path.name, (theirs, env), (made.argv, made.env)))
    return differ


def test_sparkrun_makes_the_same_of_what_it_is_given(tmp_path: Path) -> None:
    for name, change in V2.items():
        value = {"recipe_version": "2", "model": "a/b", "runtime": "vllm-distributed", "container": "vllm-node"}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(value | change, sort_keys=False))
    assert compared(sorted(tmp_path.glob("*.yaml"))) == []


if CORPUS:  # a clone alone has none of them

    def test_sparkrun_makes_the_same_of_the_public_recipes() -> None:
        second = [path for path in CORPUS if recipe.load(path).version == "2"]
        assert len(second) > 30 and compared(second) == []

    def test_recipes_for_one_machine_pass_or_say_why_not(tmp_path: Path) -> None:
        paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
        found = {path: check.check(PROJECT, str(path)) for path in CORPUS}
        alone = {path: one for path, one in found.items() if one.machines == 1}
        refused = {path.stem: one.errors for path, one in alone.items() if one.errors}
        assert len(alone) > 40
        for name, errors in refused.items():
            wanted = next((text for end, text in REFUSED.items() if name.endswith(end)), "(nothing: it should pass)")
            assert all(wanted in one.text for one in errors), f"{name}: {errors}"
            assert all(one.hint or ", expected " in one.text for one in errors), f"{name}: what mends it? {errors}"
        assert {end for end in REFUSED if any(name.endswith(end) for name in refused)} == REFUSED.keys()
        good = sorted(path for path, one in alone.items() if not one.errors and path.parent.name == "public")
        for path in good[::5]:  # those of the other folder are all taken over in test_community_tasks
            assert imported(paths, path) == [], path.stem

    def test_every_recipe_that_names_a_mod_is_taken_over_as_far_as_it_is_without_it(tmp_path: Path) -> None:
        """No mod keeps a recipe from being imported, and each is told of as one of its kind."""
        known, found = load_community_mods(PROJECT), dict[str, set[str]]()
        paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
        named = [(path, read) for path in CORPUS if (read := recipe.load(path)).applied]
        assert len(named) >= 39
        for path, read in named:
            made = Adopted()
            take_mods(made, read, PROJECT, "0.33.0")
            lines = [line for line in (*made.notes, *made.unmapped) if line.startswith("mod ")]
            assert len(lines) == len(read.applied)
            for mod in map(mod_of, read.applied):
                one = known.get(mod)
                kind = (
                    "unknown"
                    if one is None
                    else "template"
                    if one.template
                    else "refused"
                    if one.instead
                    else "needless"
                )
                found.setdefault(kind, set()).add(mod)
                assert (mod in made.mods) == (kind == "template")
            without = yaml.safe_load(path.read_text()) | {"mods": []}
            (tmp_path / path.name).write_text(yaml.safe_dump(without, sort_keys=False))
            assert imported(paths, path) == imported(paths, tmp_path / path.name), path.stem
        assert found == KINDS

    @pytest.mark.parametrize("flag", ["--no-such-flag 1", "--chat-template not-here.jinja"])
    def test_a_fault_in_a_public_recipe_is_found(tmp_path: Path, flag: str) -> None:
        text = next(path for path in CORPUS if path.stem.endswith("recipes-gemma4-26b-a4b")).read_text()
        (tmp_path / "r.yaml").write_text(text.replace("--port ", f"{flag} --port ", 1))
        (error,) = check.check(PROJECT, str(tmp_path / "r.yaml")).errors
        assert flag.split()[0] in error.text

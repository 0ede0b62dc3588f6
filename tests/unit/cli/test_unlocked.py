"""A model that nobody has locked: `plan` reads pins/shapes, and what makes something of it requires the lock."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkout_here import CheckoutHere
from places import PROJECT

from sparkpin.build.checkpoint import needs_ahead
from sparkpin.checkpoint.safetensors import tensor_nbytes
from sparkpin.checkpoint.shapes import Shapes, load_shapes
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests
from sparkpin.recipes.sizes import bytes_of

LARGE = ("--recipe", "qwen3.5-122b")
MODEL = "qwen3.5-122b-a10b"
SHAPES = sorted((PROJECT / "pins/shapes").glob("*/*.json"))


@pytest.fixture
def copy(tmp_path: Path) -> CheckoutHere:
    """With two experts a layer, which is quicker; sizes with all of them: tests/e2e/fetch/test_large_pins.py."""
    made = CheckoutHere.make(tmp_path / "copy")
    for path in (made.folder / "pins/shapes").glob("*/*.json"):
        value = json.loads(path.read_text())
        if "expert" in value["numbers"]:
            text = value["config"]["text_config"]
            text["num_experts" if "num_experts" in text else "n_routed_experts"] = value["numbers"]["expert"] = 2
        path.write_text(json.dumps(value))
    return made


def test_a_plan_of_a_model_without_a_lock(copy: CheckoutHere) -> None:
    plan = json.loads(copy.done("plan", *LARGE, "--json"))
    kinds = {row["kind"]: row["tensors"] for row in plan["weights"]}
    assert plan["locked"] is False and kinds["INT4 experts"] == 48 * 2 * 3 * 3 and kinds["FP8 layers"] == 48 * 3 * 2
    assert any("pins/shapes" in note for note in plan["notes"])
    assert not (copy.folder / f"pins/models/{MODEL}.lock").exists() and not copy.home.exists()
    file = copy.folder / "recipes/qwen3.5-122b.yaml"
    assert "vllm#46307" not in copy.invoke("plan", *LARGE).stderr
    file.write_text(file.read_text().replace("gpu_memory_utilization: 0.76", "gpu_memory_utilization: 0.9"))
    assert "vllm#46307" in copy.invoke("plan", *LARGE).stderr, "what has broken with such memory"


def test_a_million_tokens(copy: CheckoutHere) -> None:
    """The table of benchmarks/notes/memory.md: concurrency from the pool of the whole model, in bytes."""
    long = ("--recipe", "qwen3.5-122b-1m")
    plan = json.loads(copy.done("plan", *long, "--json"))
    assert plan["fits"] and any("1,048,576" in note for note in plan["notes"])
    assert not any("not counted" in note for note in plan["notes"])
    notes = (PROJECT / "benchmarks/notes/memory.md").read_text()
    text = notes.partition("## A million tokens")[2].partition("\n## ")[0]
    rows = {row[1].split(",")[0].strip(): row for line in text.splitlines() if len(row := line.split("|")) == 8}
    for one in plan["capacities"]:
        row, cache = rows.get(one["cache"]["cache_dtype"]), one["cache"]
        if row:
            assert int(row[2].replace(",", "")) == sum(
                one["part"]["layers"] * one["slot"] for one in cache["kinds"] if one["part"]["kind"] == "full"
            )
            requests = 33_910_074_681 // cache["block_bytes"] / round(one["blocks"] / one["concurrency"])
            assert float(row[4]) == round(requests, 2)
            assert int(row[3].replace(",", "")) == int(requests * 1_010_000)
    assert len(rows.keys() & {one["cache"]["cache_dtype"] for one in plan["capacities"]}) == 4
    file = copy.folder / "recipes/qwen3.5-122b-1m.yaml"
    file.write_text(file.read_text().replace("  VLLM_ALLOW_LONG_MAX_MODEL_LEN: 1\n", ""))
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in copy.invoke("plan", *long).stdout


@pytest.mark.parametrize("name", ["qwen3.6-27b-fp8", "qwen3.6-27b-nvfp4", "qwen3.6-35b-a3b-nvfp4"])
def test_other_recipes_can_be_planned(copy: CheckoutHere, name: str) -> None:
    plan = json.loads(copy.done("plan", "--recipe", name, "--memory", "128GB", "--json"))
    assert plan["fits"] and plan["problems"] == []


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_every_file_of_shapes_says_how_well_it_is_known(path: Path) -> None:
    shapes = Shapes.model_validate_json(path.read_bytes())
    assert shapes.repository == f"{path.parent.name}/{path.stem}"
    assert shapes.source and shapes.date and shapes.guessed
    names = [name for name, *_ in shapes.all_tensors()]
    assert len(names) == len(set(names)) > 0
    assert bytes_of(shapes) == sum(tensor_nbytes(dtype, shape) for _, dtype, shape in shapes.all_tensors())


@pytest.mark.parametrize("repo", ["a/b", "../models/a", "a" * 5000, "a/" + "b" * 300, "/etc/passwd", "a/../b"])
def test_a_name_that_no_file_has_is_not_known(repo: str) -> None:
    assert load_shapes(PROJECT, repo) is None


def test_a_broken_file_of_shapes_is_an_error_of_that_file(copy: CheckoutHere) -> None:
    (copy.folder / "pins/shapes/Qwen/Qwen3.5-122B-A10B-FP8.json").write_text('{"tensors": 1}')
    result = copy.invoke("plan", *LARGE)
    assert result.returncode == 4 and "pins/shapes/Qwen/Qwen3.5-122B-A10B-FP8.json" in result.stderr


@pytest.mark.parametrize(
    "line", [("build", *LARGE), ("plan", "--recipe", "qwen3.5-122b-nvfp4")], ids=lambda line: line[0]
)
def test_the_lock_is_the_next_step(copy: CheckoutHere, line: tuple[str, ...]) -> None:
    result = copy.invoke(*line)
    assert (result.returncode, "Traceback" in result.stderr) == (4, False), result.stderr
    assert f"lock --model {MODEL}" in result.stderr


def test_a_dry_run_of_up_locks_nothing_and_doctor_says_that_no_server_can_run(copy: CheckoutHere) -> None:
    told = copy.done("up", *LARGE, "--dry-run")
    assert f"lock --model {MODEL}" in told and "  hybrid " in told and re.search("[1-9.]+ GB of checkpoints", told)
    assert not (copy.folder / f"pins/models/{MODEL}.lock").exists()
    found = {row["name"]: row for row in json.loads(copy.invoke("doctor", *LARGE, "--json").stdout)["findings"]}
    assert "disk space" in found and found["server"]["state"] == "advice"


def test_the_disk_of_a_model_without_a_lock_has_each_checkpoint_once(copy: CheckoutHere) -> None:
    paths, pin = Paths(copy.folder, copy.home, copy.home), manifests.load_model(copy.folder, MODEL)
    base, hybrid, mtp = (("copy", "hybrid", "mtp")[:count] for count in (1, 2, 3))
    published = load_shapes(copy.folder, pin.repositories["int4"].repo)
    all_three = needs_ahead(paths, pin, [base, hybrid, mtp, mtp])
    first, second, third = (needs_ahead(paths, pin, [steps]) for steps in (base, hybrid, mtp))
    assert all_three and first and second and third and published
    assert first.checkpoints == 0 and first.fetch == published.listing("int4").size, "as published: links alone"
    assert all_three.checkpoints == second.checkpoints + third.checkpoints > second.checkpoints > 0
    assert first.fetch < all_three.fetch == third.fetch < first.fetch * 1.1, "of the donor what the steps take"
    (copy.folder / "pins/shapes/Qwen/Qwen3.5-122B-A10B-FP8.json").unlink()
    assert needs_ahead(paths, pin, [base, hybrid]) is None

"""Looking ahead at a model that nobody has locked: `--published`, and what `up` and `doctor` say of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from checkout_here import CheckoutHere
from places import PROJECT

from sparkpin.build.model_needs import ModelNeeds
from sparkpin.build.pair import pair
from sparkpin.checkpoint import published
from sparkpin.commands import up
from sparkpin.commands.doctor import command
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.pins import manifests

LARGE = ("--recipe", "qwen3.5-122b")
MODEL = "qwen3.5-122b-a10b"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckoutHere:
    """With two experts a layer, which is quicker; sizes with all of them: tests/e2e/fetch/test_large_pins.py."""
    few = {
        repo: (replace(geometry, experts=min(2, geometry.experts)), kind)
        for repo, (geometry, kind) in published.SHAPES.items()
    }
    monkeypatch.setattr(published, "SHAPES", few)
    monkeypatch.setattr(published, "G122B", few["Qwen/Qwen3.5-122B-A10B-FP8"][0])
    return CheckoutHere.make(tmp_path / "copy")


def test_four_tasks_look_ahead_and_say_so(copy: CheckoutHere) -> None:
    plan = json.loads(copy.done("plan", *LARGE, "--published", "--json"))
    kinds = {row["kind"]: row["tensors"] for row in plan["weights"]}
    assert plan["published"] is True and kinds["INT4 experts"] == 48 * 2 * 3 * 3 and kinds["FP8 layers"] == 48 * 3 * 2
    assert any("guessed" in note for note in plan["notes"])
    speed = json.loads(copy.done("roofline", *LARGE, "--stage", "v2", "--published", "--json"))
    assert speed["published"] is True and speed["drafted"] == 2
    rendered = copy.done("render", *LARGE, "--stage", "hybrid", "--published")
    assert "FROM sparkpin/stack-spark:base-" in rendered and "0" * 64 in rendered and "placeholder" in rendered
    checkpoint = copy.done("checkpoint", "--model", MODEL, "--stage", "hybrid", "--dry-run", "--published")
    assert "144 replaced, 144 added" in checkpoint and "408 tensors" in checkpoint and "guessed" in checkpoint
    of_recipe = copy.done("checkpoint", *LARGE, "--stage", "hybrid", "--dry-run", "--published")
    assert checkpoint.splitlines()[0] == of_recipe.splitlines()[0]
    assert not (copy.folder / f"pins/models/{MODEL}.lock").exists() and not copy.home.exists()


def test_a_plan_tells_what_has_broken_with_such_memory(copy: CheckoutHere) -> None:
    file = copy.folder / "recipes/qwen3.5-122b.yaml"
    assert "vllm#46307" not in copy.done("plan", *LARGE, "--published")
    file.write_text(file.read_text().replace("gpu_memory_utilization: 0.76", "gpu_memory_utilization: 0.9"))
    assert "vllm#46307" in copy.invoke("plan", *LARGE, "--published").stderr


def test_a_million_tokens(copy: CheckoutHere) -> None:
    """The table of docs/memory.md: concurrency from the pool of the whole model, in bytes."""
    long = ("--recipe", "qwen3.5-122b-1m", "--published")
    plan = json.loads(copy.done("plan", *long, "--json"))
    assert plan["fits"] and any("1,048,576" in note for note in plan["notes"])
    assert not any("not counted" in note for note in plan["notes"])
    text = (PROJECT / "docs/memory.md").read_text().partition("## A million tokens")[2].partition("\n## ")[0]
    rows = {row[1].split(",")[0].strip(): row for line in text.splitlines() if len(row := line.split("|")) == 8}
    for one in plan["capacities"]:
        row, cache = rows.get(one["cache"]["cache_dtype"]), one["cache"]
        if row:
            assert int(row[2].replace(",", "")) == cache["token_bytes"]
            requests = 39_681_436_985 // cache["block_bytes"] / cache["request_blocks"]
            assert float(row[4]) == round(requests, 2)
            assert int(row[3].replace(",", "")) == int(requests * 1_010_000)
    assert len(rows.keys() & {one["cache"]["cache_dtype"] for one in plan["capacities"]}) == 4
    file = copy.folder / "recipes/qwen3.5-122b-1m.yaml"
    file.write_text(file.read_text().replace("  VLLM_ALLOW_LONG_MAX_MODEL_LEN: 1\n", ""))
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in copy.invoke("plan", *long).stdout


@pytest.mark.parametrize("name", ["27b-fp8", "27b-nvfp4", "35b-a3b-fp8", "35b-a3b-nvfp4"])
def test_recipes_of_qwen36_can_be_planned(copy: CheckoutHere, name: str) -> None:
    plan = json.loads(copy.done("plan", "--recipe", f"qwen3.6-{name}", "--published", "--json"))
    assert plan["fits"] and plan["problems"] == []


def test_of_the_smaller_pair_more_is_guessed(copy: CheckoutHere) -> None:
    text = copy.done("plan", "--recipe", "qwen3.5-35b-a3b", "--published", "--memory", "128GB")
    assert "that this pair has the module names" in text
    assert "that this pair has the module names" not in copy.done("plan", *LARGE, "--published")


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (("plan", *LARGE), 4, "--published"),
        (("roofline", *LARGE), 4, "--published"),
        (("render", *LARGE), 4, "--published"),
        (("checkpoint", *LARGE, "--dry-run"), 4, "--published"),
        (("build", *LARGE), 4, f"invoke lock --model {MODEL}"),
        (("checkpoint", *LARGE, "--published"), 2, "--dry-run"),
        (("plan", "--recipe", "qwen3.5-122b-nvfp4", "--published"), 2, "invoke lock --model qwen3.5-122b-a10b-nvfp4"),
    ],
)
def test_what_is_missing_is_one_error_with_the_way_on(
    copy: CheckoutHere, line: tuple[str, ...], code: int, said: str
) -> None:
    result = copy.invoke(*line)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
    assert said in result.stderr.partition("next: ")[2]


def test_a_model_of_which_nothing_is_published_has_no_way_ahead(copy: CheckoutHere) -> None:
    assert "--published" not in copy.invoke("plan", "--recipe", "qwen3.5-122b-nvfp4").stderr


def test_a_dry_run_of_up_says_what_will_be_asked(copy: CheckoutHere) -> None:
    text = copy.done("up", *LARGE, "--dry-run")
    assert f"{MODEL} is not locked" in text and "as published" in text and "GB needed at" in text
    assert not (copy.folder / f"pins/models/{MODEL}.lock").exists()


def test_doctor_and_up_give_one_figure(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose sizes are made up here: the sums of the 122B take seconds."""
    paths, needs = Paths(project, tmp_path / "cache", tmp_path / "home"), ModelNeeds(("a/b",), 72 * 10**9, 67 * 10**9)
    recipe = manifests.load_recipe(project, LARGE[1])
    plan = up.BuildPlan(paths, pair(project, recipe.name, published=True), (), locked=False)
    images = machine.needs_for(machine.read_host(), plan.pairings[-1].stack)
    monkeypatch.setattr(command, "needs_of", lambda *_: needs)
    told = [row.detail for row in command.model_of(paths, recipe, images, served=True) if row.name == "disk in all"]
    rows = up.disk_of(plan, needs)
    assert [detail.split(",")[0] for detail in told] == [row.text.split(",")[0] for row in rows]
    assert sum(row.needed for row in rows) == 139 * 10**9 + images.cache + images.home + images.engine


def test_the_line_that_says_yes_has_all_that_was_typed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a download of a byte, which is never begun; nobody is there to ask."""
    paths = Paths(project, tmp_path / "cache", tmp_path / "home")
    plan = up.BuildPlan(paths, pair(project, LARGE[1], published=True), (), locked=False)
    monkeypatch.setattr(up, "disk_of", lambda *_: [])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(InputError) as caught:
        up.agree(plan, ModelNeeds((), 1, 0), yes=False, typed=["--stack spark", "--serve"])
    assert caught.value.next_step == f"invoke up {' '.join(LARGE)} --stage v2 --stack spark --serve --yes"


def test_doctor_lists_what_a_recipe_needs(copy: CheckoutHere) -> None:
    found = {row["name"]: row for row in json.loads(copy.invoke("doctor", *LARGE, "--json").stdout)["findings"]}
    assert "not locked" in found["model"]["detail"] and "invoke up --recipe qwen3.5-122b" in found["model"]["fix"]
    assert {"disk space", "disk in all", "memory plan", "server", "GPU"} <= set(found)
    assert "needs" in found["memory plan"]["detail"]
    assert copy.invoke("doctor", *LARGE, "--stack", "cpu").returncode == 2

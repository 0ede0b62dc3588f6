"""What a recipe says and stack or stages replace is told, by every task that a user might wonder at."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from checkout_here import CheckoutHere
from made_recipes import recipe, stack, stage

from sparkpin.build.pair import pair
from sparkpin.cli import notes as commands_notes
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.pins.vllm_command import origins, overruled
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release

R, S = "recipes/r.yaml", "pins/stacks/cpu.yaml"


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("--enable-x", {"--no-enable-x": None}, f"{R}: --enable-x has no effect: {S} sets --no-enable-x"),
        ("-tp 2", {"--tensor-parallel-size": 1}, f"{R}: -tp 2 has no effect: {S} sets --tensor-parallel-size 1"),
        ("--sc.n 2", {"--sc": {"n": 1}}, f"{R}: --sc.n 2 has no effect: {S} sets --sc " + '{"n":1}'),
        ("--no-enable-x", {"--no-enable-x": None}, None),
        ("--tensor_parallel_size=2", {"-tp": 2}, None),
        ("""--sc '{{ "n": 1 }}'""", {"--sc": {"n": 1}}, None),
        ("--y 1", {"--x": 1}, None),
    ],
)
def test_flags(command: str, flags: dict[str, Any], said: str | None) -> None:
    known = {("--" + "tensor-parallel-size" if name == "-tp" else name): value for name, value in flags.items()}
    assert overruled(recipe(f"vllm serve a/b {command}"), stack(flags=known), ()) == ([said] if said else [])


def test_the_file_with_the_last_word_is_named() -> None:
    own = recipe("vllm serve a/b --k 1 --own 1", env={"A": 1, "B": True, "C": 1})
    below, chain = stack(flags={"--k": 2}, env={"A": 2}), (stage("one", flags={"--k": 3}, env={"B": "1"}), stage("two"))
    assert overruled(own, below, chain) == [
        f"{R}: --k 1 has no effect: stages/one.yaml sets --k 3",
        f"{R}: A=1 has no effect: {S} sets A=2",
    ]
    where = origins(own, below, chain)
    assert [where[key] for key in ("--k", "--own", "A", "B", "C")] == ["stages/one.yaml", R, S, "stages/one.yaml", R]


WANTED = (
    "note: recipes/scripted-tiny.yaml: VLLM_CPU_KVCACHE_SPACE=4 has no effect: "
    "pins/stacks/cpu.yaml sets VLLM_CPU_KVCACHE_SPACE=1\n"
)


@pytest.fixture
def copy(tmp_path: Path) -> CheckoutHere:
    made = CheckoutHere.make(tmp_path / "copy")
    made.replace("recipes/scripted-tiny.yaml", "env:\n", "env:\n  VLLM_CPU_KVCACHE_SPACE: 4\n")
    return made


def test_build_up_and_plan_say_it(copy: CheckoutHere) -> None:
    """build says it before it does anything: here no engine answers."""
    result = copy.invoke("build", DOCKER_HOST="unix:///nowhere/docker.sock")
    assert result.returncode != 0 and WANTED in result.stderr
    assert WANTED in copy.invoke("up", "--dry-run").stderr
    assert WANTED in copy.done("plan", "--memory", "32GB")


def test_serve_says_it_of_the_files_that_the_release_was_made_from(
    copy: CheckoutHere, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = Paths(copy.folder, tmp_path / "cache", copy.home)
    paired = pair(copy.folder, "scripted-tiny", stage="base")[-1]
    digest = "sha256:" + "0" * 64
    release = Release(
        tag=tag_of("scripted-tiny", "base", paired.key), recipe="scripted-tiny", stage="base", stack="cpu",
        model="scripted-tiny", key=paired.key, build_key=paired.key, image=digest, diff_ids=(digest,), size=1,
        checkpoint_key=paired.checkpoint_key, argv=paired.argv, env=paired.env, created="2026-01-01T00:00:00Z",
        build_seconds=0.0, demands=paired.demands, inputs=paired.inputs, executable=paired.executable,
    )  # fmt: skip
    commands_notes.say_overruled_of(paths, release)
    assert capsys.readouterr().err == ""  # nothing is kept
    KeptInputs.of(paths).keep_project(copy.folder, paired.inputs)
    copy.replace("recipes/scripted-tiny.yaml", "  VLLM_CPU_KVCACHE_SPACE: 4\n", "")
    commands_notes.say_overruled_of(paths, release)
    assert WANTED in capsys.readouterr().err
    commands_notes.say_overruled_of(paths, dataclasses.replace(release, inputs={}))
    assert capsys.readouterr().err == ""

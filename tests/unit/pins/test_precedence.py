"""What a recipe says and stack or stages replace is told, by every task that a user might wonder at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkout_here import CheckoutHere
from made_recipes import recipe, stack, stage

from sparkpin.pins.vllm_command import origins, overruled

R, S = "recipes/r.yaml", "pins/stacks/cpu.yaml"


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("--enable-x", {"--no-enable-x": None}, f"{R}: --enable-x has no effect: {S} sets --no-enable-x"),
        ("-tp 2", {"--tensor-parallel-size": 1}, f"{R}: -tp 2 has no effect: {S} sets --tensor-parallel-size 1"),
        ("--sc.n 2", {"--sc": {"n": 1}}, f"{R}: --sc.n 2 has no effect: {S} sets --sc " + '{"n":1}'),
        ("--tensor_parallel_size=2", {"--tensor-parallel-size": 2}, None),
        ("""--sc '{{ "n": 1 }}'""", {"--sc": {"n": 1}}, None),
        ("--middleware a.B --middleware c.D", {"--middleware": "e.F"}, None),
    ],
)
def test_flags(command: str, flags: dict[str, Any], said: str | None) -> None:
    assert overruled(recipe(f"vllm serve a/b {command}"), stack(flags=flags), ()) == ([said] if said else [])


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
    assert WANTED in copy.invoke("plan", "--memory", "32GB").stderr

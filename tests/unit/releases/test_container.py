"""What a container is given of a checkpoint: its size, its time to start, and files that it can read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkpin.core.errors import CheckpointError
from sparkpin.releases import container as running

SIZE = 3 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """With a drafter, whose files lie in a folder of their own."""
    tmp_path.chmod(0o755)
    (tmp_path / "drafter").mkdir(mode=0o755)
    for name in ("model.safetensors", "drafter/model.safetensors"):
        (tmp_path / name).write_bytes(b"x" * SIZE)
        (tmp_path / name).chmod(0o644)
    return tmp_path


def test_a_drafter_counts(checkpoint: Path) -> None:
    engine = cast(Any, SimpleNamespace(client=SimpleNamespace(info=lambda: {"MemTotal": 1 << 40})))
    assert running.memory_limit(engine, checkpoint) == 2 * 2 * SIZE + 8 * running.GIB
    compilers = running.compiler_jobs(1 << 40, checkpoint) * running.COMPILER
    assert running.memory_limit(engine, checkpoint, gpus=True) == 22 * running.GIB + compilers
    assert running.ready_timeout(checkpoint) == 600 + 2 * SIZE / 50e6


@pytest.mark.parametrize(
    ("memory", "jobs"),
    [(24, 1), (16, 1), (16 + 9 * 8, 9), (1000, 20), (121, 13)],
)
def test_compilers_take_no_more_than_the_machine_has(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, memory: int, jobs: int
) -> None:
    """8 GiB each, beside 16 GiB and the weights; one at least, and one a core at most."""
    monkeypatch.setattr(running.os, "cpu_count", lambda: 20)
    monkeypatch.setattr(running, "folder_size", lambda _: 1)
    assert running.compiler_jobs(memory * running.GIB + 1, checkpoint) == jobs
    monkeypatch.setattr(running, "folder_size", lambda _: 66 * running.GIB)
    assert running.compiler_jobs(121 * running.GIB, checkpoint) == 4


@pytest.mark.parametrize("name", ["model.safetensors", "drafter/model.safetensors", "drafter"])
def test_what_the_container_cannot_read(checkpoint: Path, name: str) -> None:
    running.require_readable(checkpoint)
    (checkpoint / name).chmod(0o600)
    with pytest.raises(CheckpointError) as caught:
        running.require_readable(checkpoint)
    assert str(checkpoint / name) in caught.value.message

"""What a container is given of a checkpoint: its size, its time to start, and files that it can read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_releases import release

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


def machine_of(memory: int, cores: int = 20) -> Any:
    """An engine's, which may be another than this one."""
    return SimpleNamespace(info={"MemTotal": memory, "NCPU": cores})


def test_a_drafter_counts(checkpoint: Path) -> None:
    assert running.memory_limit(machine_of(1 << 40), checkpoint) == 2 * 2 * SIZE + 8 * running.GIB
    assert running.ready_timeout(checkpoint) == 600 + 2 * SIZE / 50e6


@pytest.mark.parametrize(("memory", "weights", "jobs"), [(24, 0, 1), (121, 66, 4), (121, 0, 10), (1000, 0, 20)])
def test_compilers_take_no_more_than_the_machine_has(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, memory: int, weights: int, jobs: int
) -> None:
    """8 GiB each, beside 16 GiB and the weights, within a limit of nine tenths; one at least, and one a core at most.
    The machine is the engine's."""
    monkeypatch.setattr(running, "folder_size", lambda _: weights * running.GIB)
    limit = running.memory_limit(machine_of(memory * running.GIB), checkpoint, gpus=True)
    made = running.options(release(1), "/on/another/machine", memory=limit, gpus=True, cache="cache")
    assert made["environment"]["MAX_JOBS"] == str(jobs)


@pytest.mark.parametrize("name", ["model.safetensors", "drafter/model.safetensors", "drafter"])
def test_what_the_container_cannot_read(checkpoint: Path, name: str) -> None:
    running.require_readable(checkpoint)
    (checkpoint / name).chmod(0o600)
    with pytest.raises(CheckpointError) as caught:
        running.require_readable(checkpoint)
    assert str(checkpoint / name) in caught.value.message

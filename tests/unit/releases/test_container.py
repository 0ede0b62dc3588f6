"""What a container is given of a checkpoint: its size, its time to start, and files that it can read."""

from __future__ import annotations

from pathlib import Path
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


def test_a_drafter_counts(checkpoint: Path) -> None:
    assert running.ready_timeout(checkpoint) == 600 + 2 * SIZE / 50e6


def test_a_server_gets_no_address_no_key_and_keeps_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy one is told from one that hangs by its counters, whatever the recipe says."""
    monkeypatch.setattr(running, "cache_volume", lambda *_: "cache")
    own = ("--host", "0.0.0.0", "--port", "1", "--api-key", "k", "--disable-log-stats", "--max-num-seqs", "4")
    one = release(1, argv=("vllm", "serve", "/model", *own), env={"VLLM_API_KEY": "k"})
    engine: Any = None
    made = running.server_settings(engine, one, "v", "/run/s", None, None, memory=None, gpus=False)
    assert made["command"] == ["vllm", "serve", "/model", "--max-num-seqs", "4", "--uds", "/run/s"]
    assert "VLLM_API_KEY" not in made["environment"] and made["network_mode"] == "none"


@pytest.mark.parametrize("name", ["model.safetensors", "drafter/model.safetensors", "drafter"])
def test_what_the_container_cannot_read(checkpoint: Path, name: str) -> None:
    running.require_readable(checkpoint)
    (checkpoint / name).chmod(0o600)
    with pytest.raises(CheckpointError) as caught:
        running.require_readable(checkpoint)
    assert str(checkpoint / name) in caught.value.message

"""A pair over two engines, with a stand-in for vLLM: served, switched, brought back, stopped. With vLLM itself it is in
tests/e2e/serve/test_two_engines.py."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nodes import for_nodes
from two_hosts import OtherHost, other_host
from watched import signal_processes, until

from sparkpin.core.errors import SmokeError
from sparkpin.core.tags import tag_of
from sparkpin.releases.record import Release
from sparkpin.serve import cluster, launch, linked, service
from sparkpin.serve.cluster import ClusterOptions
from sparkpin.serve.served import find

if TYPE_CHECKING:
    from fake_release import FakeSite  # pytest loads it itself, below

pytest_plugins = ["fake_release"]


@pytest.fixture
def host(site: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherHost]:
    """It has the release's image and checkpoint."""
    (site.checkpoint / "sparkpin.json").write_text(json.dumps({"files": {"config.json": {"size": 2}}}))
    monkeypatch.setattr(cluster, "listeners", lambda port: "")  # another test may serve a pair, on another link
    (tmp_path / "other").mkdir()
    with other_host(tmp_path / "other") as host:
        monkeypatch.setenv("PATH", host.ssh.path)
        release = site.release
        host.engine.client.images.load(b"".join(site.engine.client.images.get(release.tag).save(named=release.tag)))
        there = host.ssh.home / f"carried/{release.model}/{release.checkpoint_key[:16]}"
        shutil.copytree(site.checkpoint, there)
        yield host
        service.stop(site.paths, site.engine, None)


def another(site: FakeSite, host: OtherHost, letter: str, **env: str) -> Release:
    """A release of the same image."""
    made = dataclasses.replace(for_nodes(site.release), key=letter * 64, tag=tag_of("fake", "base", letter * 64))
    for engine in (site.engine, host.engine):
        engine.tag(site.release.tag, made.tag)
    return dataclasses.replace(made, env=made.env | env)


def test_a_pair_is_switched_brought_back_and_stopped_as_one(site: FakeSite, host: OtherHost) -> None:
    first, second, bad = (another(site, host, *one) for one in ("a", "b", "c"))
    bad = dataclasses.replace(bad, env=bad.env | {"FAKE_VLLM": "worker-exit"})
    where = ClusterOptions(host.url, host.own)

    def others() -> list[str]:
        return [one.labels["sparkpin.release"] for one in host.engine.client.containers.list(all=True)]

    try:
        served = site.start(first, port=site.port, where=where)
        assert others() == [first.tag] and site.start(first).started == served.started, "left alone, as before"
        container = find(site.engine, served.container)
        assert container is not None and linked.states(served.home, "fake") == {host.url: "running"}

        signal_processes(host.engine.client.containers.list()[0], "vllm serve", "KILL")
        until(lambda: container.reload() or container.attrs["RestartCount"] == 1, 60)  # type: ignore[func-returns-value]
        until(lambda: launch.asks(container), 60)

        assert site.start(second).release == second.tag and others() == [second.tag]
        with pytest.raises(SmokeError, match=rf"{host.url}: {bad.tag} exited with 1"):
            site.start(bad)
        again = find(site.engine, served.container)
        assert again is not None and again.labels["sparkpin.release"] == second.tag and others() == [second.tag]
        until(lambda: launch.asks(again), 60)

        service.stop(site.paths, site.engine, "fake")
        assert others() == [] and find(site.engine, served.container) is None
    finally:
        for release in (first, second, bad):
            site.engine.untag(release.tag)

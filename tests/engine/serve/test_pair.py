"""Process 1 of each of two machines, in containers on one real engine, with a stand-in for vLLM: they end together, and
Docker starts them again. tests/e2e/serve/test_pair_vllm.py does it with vLLM itself."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING

import pytest
from nodes import Pair, for_nodes, pair
from watched import signal_processes, until

from sparkpin.core.errors import InputError
from sparkpin.releases import container as running
from sparkpin.releases import inside
from sparkpin.releases.record import Release
from sparkpin.serve import linked
from sparkpin.serve.cluster import Machine
from sparkpin.serve.linked import Part
from sparkpin.smoke.evidence import Evidence, evidence_folder, replaced
from sparkpin.smoke.run import run_smoke
from sparkpin.smoke.server import Place, own_server

if TYPE_CHECKING:
    from fake_release import FakeSite  # pytest loads it itself, below

pytest_plugins = ["fake_release"]
ALLOWED = {"model_readable", "tmp_writable", "home_writable"}
FAULTS = [
    ("worker-exit", "start", "of rank 1 exited with 1"),
    ("worker-without-mods", "mods", "rank 1: mod vllm-cpu is not active"),
]


@pytest.fixture
def double(site: FakeSite) -> Release:
    return for_nodes(site.release)


def answering(both: Pair, lives: list[int]) -> None:
    until(lambda: both.lives() == lives and both.answers(), 120)
    time.sleep(3 * inside.LOOK_SECONDS)  # vLLM takes longer than that from its store to its first answer


def health_of(both: Pair) -> set[str]:
    for container in both.containers:
        container.reload()
    return {container.attrs["State"]["Health"]["Status"] for container in both.containers}


def test_what_ends_one_ends_both_and_they_join_anew(site: FakeSite, double: Release) -> None:
    with pair(site.engine, double, site.checkpoint) as both:
        answering(both, [1, 1])
        head, worker = both.containers
        until(lambda: health_of(both) == {"healthy"})

        signal_processes(worker, "vllm serve", "KILL")
        answering(both, [2, 2])
        assert "ended by signal 9" in both.said(1) and "has gone from torch's store" in both.said(0)

        signal_processes(head, "vllm serve", "KILL")
        answering(both, [3, 3])
        assert "ended by signal 9" in both.said(0) and "has gone from torch's store" in both.said(1)
        assert both.counted() == ["2", "2"]

        parts = [Part(Machine("here", site.engine), head), Part(Machine("ssh://b", site.engine), worker)]
        linked.for_all(parts, lambda part: part.container.stop(timeout=20))
        for container in both.containers:
            container.reload()
            assert container.attrs["State"]["ExitCode"] == 0, "asked, both at once"


def test_a_head_that_loses_its_power_ends_the_worker(site: FakeSite, double: Release) -> None:
    """Its network is taken away: no connection is closed, and nobody answers."""
    with pair(site.engine, double, site.checkpoint) as both:
        answering(both, [1, 1])
        head = both.containers[0]
        head.reload()
        (network,) = head.attrs["NetworkSettings"]["Networks"]
        site.engine.client.networks.get(network).disconnect(head, force=True)
        until(lambda: both.lives()[1] == 2, 120)
        assert "no longer answers" in both.said(1) and both.lives()[0] == 1


def test_a_worker_that_fails_too_often_stays_down_and_ends_when_asked(site: FakeSite, double: Release) -> None:
    bad = dataclasses.replace(double, env=double.env | {"FAKE_VLLM": "worker-exit"})
    with pair(site.engine, bad, site.checkpoint, restarts=1) as both:
        head, worker = both.containers
        until(lambda: "stays down: it has been started again 1 times" in both.said(1), 120)
        for container in both.containers:
            container.reload()
        assert running.stays_down(worker) and not running.stays_down(head) and both.lives() == [1, 2]
        worker.stop(timeout=20)
        worker.reload()
        assert worker.attrs["State"]["ExitCode"] == 0


def test_one_container_does_not_serve_a_release_for_two(site: FakeSite, double: Release) -> None:
    with pytest.raises(InputError, match="expected 2"):
        site.start(double, port=site.port)


def smoked(site: FakeSite, release: Release) -> Evidence:
    serving = own_server(site.paths, release, [Place(site.engine, site.checkpoint, None)])
    return run_smoke(site.paths, site.engine, release, serving)


def test_the_smoke_test_asks_all_nodes_and_keeps_the_log_of_each(site: FakeSite, double: Release) -> None:
    evidence = smoked(site, double)
    assert not evidence.failures
    with replaced(evidence_folder(site.paths, site.release)) as folder:
        evidence.write(folder)
    logs = [(evidence_folder(site.paths, site.release) / name).read_text() for name in ("server.log", "server-1.log")]
    argvs = [json.loads(text.partition("\nargv ")[2].partition("\n")[0]) for text in logs]
    assert [argv[argv.index("--node-rank") + 1] for argv in argvs] == ["0", "1"]
    assert "--headless" in argvs[1] and "--uds" not in argvs[1]
    facts = [json.loads(text.partition("\nfacts ")[2].partition("\n")[0]) for text in logs]
    assert all({name for name, may in one.items() if may} == ALLOWED for one in facts), "each is closed in"


@pytest.mark.parametrize(("fault", "check", "told"), FAULTS)
def test_a_fault_of_rank_1_fails_the_smoke_test(
    site: FakeSite, double: Release, fault: str, check: str, told: str
) -> None:
    bad = dataclasses.replace(double, env=double.env | {"FAKE_VLLM": fault})
    result = smoked(site, bad).result
    failed = [one for one in result["checks"] if not one["passed"]]
    assert [one["name"] for one in failed] == [check] and told in failed[0]["detail"]

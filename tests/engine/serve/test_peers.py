"""Process 1 of each node, in containers on one real engine, with a stand-in for vLLM: they meet before a server starts,
end together, and Docker starts them again. tests/e2e/serve/test_pair_vllm.py does it with vLLM itself."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import docker.errors
import pytest
from nodes import Pair, for_nodes, inspected, pair
from watched import signal_processes, until

from sparkpin.core.errors import InputError
from sparkpin.releases import inside
from sparkpin.releases.record import Release
from sparkpin.serve import launch, linked
from sparkpin.smoke.evidence import evidence_folder, replaced
from sparkpin.smoke.run import run_smoke

if TYPE_CHECKING:
    from fake_release import FakeSite  # pytest loads it itself, below

pytest_plugins = ["fake_release"]
ALLOWED = {"model_readable", "tmp_writable", "home_writable"}
FAULTS = [
    ("worker-exit", "start", "the container of rank 1 exited with 1"),
    ("worker-without-mods", "mods", "rank 1: mod vllm-cpu is not active"),
]
STATE = f"import os; s = os.stat('{launch.FOLDER}/{inside.PEERS_KEY}'); print(oct(s.st_mode & 0o777), s.st_uid)"


@pytest.fixture
def double(site: FakeSite) -> Release:
    (site.checkpoint / "sparkpin.json").write_text('{"key": "of this checkpoint"}')
    return for_nodes(site.release)


def answering(both: Pair, lives: list[int]) -> None:
    until(lambda: both.lives() == lives and both.answers(), 120)


def test_what_ends_one_ends_both_and_they_meet_anew(site: FakeSite, double: Release) -> None:
    with pair(site.engine, [double] * 2, [site.checkpoint] * 2) as both:
        answering(both, [1, 1])
        head, worker = both.containers
        for container in both.containers:
            top = json.dumps(container.top(ps_args="-eo pid,args"))
            assert both.key not in inspected(container) + top + container.logs().decode()
            assert container.exec_run([*launch.PYTHON, "-c", STATE]).output == b"0o400 10001\n"
        until(lambda: {c.attrs["State"]["Health"]["Status"] for c in both.containers if inspected(c)} == {"healthy"})

        signal_processes(worker, "vllm serve", "KILL")
        answering(both, [2, 2])
        assert "ended by signal 9" in both.said(1) and "rank 1 closed the connection: ending" in both.said(0)
        assert both.counted() == ["0", "1"], "each counts its own ends alone"

        signal_processes(head, "vllm serve", "KILL")
        answering(both, [3, 3])
        assert both.counted() == ["1", "1"]

        worker.pause()
        until(lambda: "rank 1 was silent for 10 s" in both.said(0), 60)
        until(lambda: both.states()[0][2] == 3 and not launch.asks(head)[0], 60)
        worker.unpause()
        answering(both, [4, 4])

        worker.stop(timeout=20)
        assert both.states()[1][:2] == ("exited", 0), "asked"
        until(lambda: both.said(0).count("waiting for 1 other node(s)") == 5, 60)
        until(lambda: launch.within(head, "health") == (False, "it waits for the other nodes"), 60)
        worker.start()
        answering(both, [5, 5])
        assert both.counted() == ["1", "2"]


@pytest.mark.parametrize("what", ["release", "checkpoint"])
def test_another_release_starts_no_server_and_uses_up_no_restart(site: FakeSite, double: Release, what: str) -> None:
    checkpoint, other = site.checkpoint, double
    if what == "release":
        other = dataclasses.replace(double, key="0" * 64)
    else:
        checkpoint = site.checkpoint.with_name("other")
        checkpoint.mkdir()
        (checkpoint / "sparkpin.json").write_text("{}")
    with pair(site.engine, [double, other], [site.checkpoint, checkpoint]) as both:
        until(lambda: all(count > 1 for _, _, count in both.states()), 120)
        for rank, container in enumerate(both.containers):
            assert f"sparkpin: REFUSED: rank {1 - rank} serves something else: {what} " in both.said(rank)
            with pytest.raises(docker.errors.NotFound):
                container.get_archive(f"{launch.FOLDER}/state/restarts")
        assert both.lives() == [0, 0]
        assert {code for _, code, _ in both.states()} <= {0, 73}  # 0: it is being started again


def test_another_key_keeps_both_waiting_and_says_so(site: FakeSite, double: Release) -> None:
    with pair(site.engine, [double] * 2, [site.checkpoint] * 2, keys=["one", "other"]) as both:
        until(lambda: "it has not the key of these nodes" in both.said(0), 60)
        until(lambda: "does not take the key of this node; calling again" in both.said(1), 60)
        until(lambda: launch.within(both.containers[1], "health")[1] == "it waits for the other nodes", 60)
        assert both.lives() == [0, 0] and both.states() == [("running", 0, 0)] * 2
        for container in both.containers:
            container.stop(timeout=20)
        assert both.states() == [("exited", 0, 0)] * 2


def test_the_node_that_fails_too_often_stays_down_and_the_other_waits(site: FakeSite, double: Release) -> None:
    bad = dataclasses.replace(double, env=double.env | {"FAKE_VLLM": "worker-exit"})
    with pair(site.engine, [bad] * 2, [site.checkpoint] * 2, restarts=1) as both:
        until(lambda: "stays down: it has been started again 1 times" in both.said(1), 120)
        until(lambda: both.said(0).count("waiting for 1 other node(s)") == 3, 60)
        assert [state for state, _, _ in both.states()] == ["running"] * 2 and both.lives() == [2, 2]
        assert linked.stays_down(both.containers[1]) and not linked.stays_down(both.containers[0])
        assert both.containers[1].attrs["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
        both.containers[1].stop(timeout=20)
        assert both.states()[1][:2] == ("exited", 0), "asked, it ends"


def test_one_container_does_not_serve_a_release_for_two(site: FakeSite, double: Release) -> None:
    with pytest.raises(InputError, match="is for 2 machines"):
        site.start(double, port=site.port)


def test_the_smoke_test_asks_all_nodes_and_keeps_the_log_of_each(site: FakeSite, double: Release) -> None:
    result, write = run_smoke(site.paths, site.engine, double, site.checkpoint)
    assert result.passed, result
    with replaced(evidence_folder(site.paths, site.release)) as folder:
        write(folder)
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
    result, _ = run_smoke(site.paths, site.engine, bad, site.checkpoint)
    failed = [one for one in result.checks if not one.passed]
    assert [one.name for one in failed] == [check] and told in failed[0].detail

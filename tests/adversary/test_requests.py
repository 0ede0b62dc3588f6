"""Hostile and odd requests to a real server that drafts: each is refused with a reason, or the control beside it is
answered in time, as it is alone, and the engine lives. What is refused is not sent.

Other work on the machine may be to blame for a late answer. The trial is then sent again, and five times the control's
time beside an ordinary long request is allowed, measured at that moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import httpx
import pytest
from checkout import PROJECT
from request_trials import CHAT, HELLO, MODEL, TRIALS, Trial, attack, refused_before, text

from sparkpin.build.make import checkpoint_of
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.container import ready_timeout
from sparkpin.releases.record import Release
from sparkpin.smoke.client import Client
from sparkpin.smoke.scripts import CHAT as ANSWER
from sparkpin.smoke.server import Server, started

CONTROL = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "temperature": 0}
ORDINARY = text("ordinary", prompt="m" * 1900, max_tokens=100, ignore_eos=True)
SECONDS = 2.0  # for the control's answer, on a machine with nothing else to do
MOST = 20.0  # seconds on any machine: a trial that goes on after its client has left delays the ordinary request, too
TRIES = 4


@dataclasses.dataclass
class Victim:
    """A server, started again when a trial has ended it."""

    paths: Paths
    release: Release
    stack: contextlib.ExitStack
    server: Server | None = None

    def up(self) -> None:
        if self.server and not self.server.exit_reason():
            return
        self.stack.close()
        model, engine = checkpoint_of(Paths.from_env(PROJECT), self.release), Engine.connect()
        timeout = ready_timeout(model)
        self.server = self.stack.enter_context(
            started(self.paths, engine, self.release, model, gpus=False, timeout=timeout, say=print)
        )
        with Client.unix(self.server.socket, timeout=120) as client:
            self.server.wait_ready(client)
        for _ in range(8):  # a warm server's times are meant
            self.control()

    def http(self) -> httpx.Client:
        assert self.server
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.server.socket)), base_url="http://server", timeout=30
        )

    def control(self) -> float:
        """Seconds that the control took; its answer must be that of the scripted model."""
        begin = time.monotonic()
        with self.http() as http:
            reply = http.post(CHAT, json=CONTROL)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == ANSWER.expected_content
        return time.monotonic() - begin


@pytest.fixture(scope="module")
def running(stages: dict[str, Release], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    home = tmp_path_factory.mktemp("home")  # its containers are no leftovers of ours
    with contextlib.ExitStack() as stack:
        yield Victim(dataclasses.replace(Paths.from_env(PROJECT), home=home), stages["v2-tq"], stack)


@pytest.fixture
def victim(running: Victim) -> Victim:
    running.up()
    return running


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_a_request_is_refused_or_leaves_the_server_as_it_was(victim: Victim, trial: Trial) -> None:
    if why := refused_before(trial):
        print(f"{trial.name} | refused: {why}")
        return
    status, _, slowest = attack(victim.http, trial, victim.control)
    limit = SECONDS
    for _ in range(TRIES - 1):  # other tests share the machine: what stalls a server does so each time
        if slowest > limit:
            limit = min(max(SECONDS, 5 * attack(victim.http, ORDINARY, victim.control)[2]), MOST)
            status, _, slowest = attack(victim.http, trial, victim.control)
    victim.control()
    assert victim.server and not victim.server.exit_reason()
    print(f"{trial.name} | {status} | control {slowest:.2f} s of {limit:.2f} s")
    assert slowest <= limit

"""Hostile and odd requests to a real server that drafts: each is refused with a reason, or the control beside it is
answered in time, as it is alone, and the engine lives. What would end or stall it has to be refused by mods/guard.

Other work on the machine may be to blame for a late answer. The trial is then sent again, and five times the control's
time beside an ordinary long request is allowed, measured at that moment.
"""

from __future__ import annotations

import dataclasses
import json
import time

import httpx
import pytest
from cpu_stages import Service
from request_trials import CHAT, HELLO, MODEL, TRIALS, Trial, attack, text
from sparkpin_guard import MOD

from benchmarks.scripted_tiny.scripts import CHAT as ANSWER
from sparkpin.serve.proxy import RULES

CONTROL = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "temperature": 0}
ORDINARY = text("ordinary", prompt="m" * 1900, max_tokens=100, ignore_eos=True)
SECONDS = 2.0  # for the control's answer, on a machine with nothing else to do
MOST = 20.0  # seconds on any machine: a trial that goes on after its client has left delays the ordinary request, too
TRIES = 4
PATHS = {path for paths in RULES["paths"].values() for path in paths}
CLOSED = ",".join(sorted({trial.path for trial in TRIALS if trial.must_be_refused} - PATHS))
"""Paths that the proxy would refuse by itself."""


@dataclasses.dataclass(frozen=True)
class Victim:
    """The server, which Docker starts again when a trial has ended it."""

    url: str
    server: Service

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url.removesuffix("/v1"), trust_env=False, timeout=30)

    def control(self) -> float:
        """Seconds that the control took; its answer must be that of the scripted model."""
        begin = time.monotonic()
        with self.http() as http:
            reply = http.post(CHAT, json=CONTROL)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == ANSWER.expected_content
        return time.monotonic() - begin

    def restarts(self) -> int:
        return int(self.server.container.attrs["RestartCount"])


@pytest.fixture(scope="module")
def victim(server: Service) -> Victim:
    found = Victim(server.at(allow=CLOSED).url, server)
    for _ in range(8):  # a warm server's times are meant
        found.control()
    return found


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_a_request_is_refused_or_leaves_the_server_as_it_was(victim: Victim, trial: Trial) -> None:
    before = victim.restarts()
    status, said, slowest = attack(victim.http, trial, victim.control)
    if trial.must_be_refused:
        assert status == "400" and json.loads(said)["error"]["type"] == MOD
    limit = SECONDS
    for _ in range(TRIES - 1):  # other tests share the machine: what stalls a server does so each time
        if slowest > limit:
            limit = min(max(SECONDS, 5 * attack(victim.http, ORDINARY, victim.control)[2]), MOST)
            status, _, slowest = attack(victim.http, trial, victim.control)
    victim.control()
    assert victim.restarts() == before
    print(f"{trial.name} | {status} | control {slowest:.2f} s of {limit:.2f} s")
    assert slowest <= limit

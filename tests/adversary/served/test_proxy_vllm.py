"""An enemy's requests at the proxy of a real vLLM: paths, keys, methods and headers. The list is in proxy_trials."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import proxy_trials
import pytest
from cpu_stages import Service

from sparkpin.host.engine import Engine
from sparkpin.serve.proxy import RULES
from sparkpin.serve.served import Served

LOGGED = re.compile(rb'"([A-Z]+) (\S+) HTTP/1\.1" \d+')
OURS = {
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("POST", "/v1/completions"),
}  # the health check, and the requests beside
BODY = {"model": "scripted-tiny", "prompt": "The sky is blue and", "max_tokens": 1}


@pytest.fixture(scope="module")
def served(server: Service) -> Iterator[tuple[Served, str]]:
    """A server that others may reach, and its key."""
    yield server.at("0.0.0.0", "per_second=1000000,idle=5"), server.key.read_text().strip()
    server.at()


def test_no_trial_reaches_vllm(served: tuple[Served, str], record_property: Callable[[str, object], None]) -> None:
    server, key = served
    container = Engine.connect().client.containers.get(server.container)
    before = len(container.logs())
    tried, through, waited = list(proxy_trials.trials(key)), list[str](), 0.0
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=60) as client:
        for number, trial in enumerate(tried):
            if not proxy_trials.refused(proxy_trials.sent(server.address.port, trial.raw)):
                through.append(trial.why)
            if number % 50 == 0:  # beside them, one who has the key
                began = time.monotonic()
                assert client.post(f"{server.url}/completions", json=BODY).status_code == 200
                waited = max(waited, time.monotonic() - began)
    reached = Counter(
        found.groups() for line in container.logs()[before:].splitlines() if (found := LOGGED.search(line))
    )
    others = {(method.decode(), path.decode()) for method, path in reached} - OURS
    record_property("trials", len(tried))
    print(f"the longest wait of a client beside them: {waited:.1f} s")
    assert through == [] and others == set()
    container.reload()
    assert container.attrs["RestartCount"] == 0


def test_each_path_of_the_table_is_one_of_vllm(served: tuple[Served, str]) -> None:
    server, key = served
    base = server.url.removesuffix("/v1")
    with httpx.Client(base_url=base, headers={"x-api-key": key}, trust_env=False, timeout=120) as client:
        said = {
            path: client.request(method, path, json={} if method == "POST" else None)
            for method, paths in RULES["paths"].items()
            for path in paths
        }
    assert not {
        path: reply.status_code for path, reply in said.items() if reply.status_code in (401, 403, 404, 405, 502, 503)
    }

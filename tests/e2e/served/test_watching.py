"""The dashboard of docs/grafana.json: a real Prometheus scrapes a real vLLM through its proxy, and answers each panel.

The job is that of docs/serving.md.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cpu_stages import Service
from places import PROJECT
from watched import free_port, until

from sparkpin.serve.served import Served

PANELS = json.loads((PROJECT / "docs/grafana.json").read_text())["panels"]
QUERIES = [target["expr"].replace("$__rate_interval", "5s") for panel in PANELS for target in panel["targets"]]
JOB = re.search(r"^ +scrape_configs:\n(?: +.*\n)+", (PROJECT / "docs/serving.md").read_text(), re.MULTILINE)
BODY = {"model": "scripted-tiny", "prompt": "The sky is blue and the grass is", "max_tokens": 20}


@pytest.fixture(scope="module")
def watched(server: Service) -> Iterator[tuple[Served, Path]]:
    """A server that expects a key, and the file with it."""
    yield server.at("0.0.0.0"), server.key
    server.at()


def test_each_metric_of_the_dashboard_is_one_of_vllm(watched: tuple[Served, Path]) -> None:
    served, key = watched
    url, headers = served.url.replace("/v1", "/metrics"), {"Authorization": f"Bearer {key.read_text().strip()}"}
    text = httpx.get(url, headers=headers, trust_env=False, timeout=60).text
    there = set(re.findall(r"^(vllm:\w+)", text, re.MULTILINE))
    asked = set(re.findall(r"vllm:\w+", " ".join(QUERIES)))
    assert len(PANELS) == 6 and asked and asked <= there


@pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus (apt-get install prometheus)")
def test_prometheus_scrapes_it_and_answers_each_panel(watched: tuple[Served, Path], tmp_path: Path) -> None:
    served, key = watched
    assert JOB
    config = JOB[0].replace("/home/me/.local/share/sparkpin/keys/RECIPE", str(key)).replace("15s", "1s")
    (tmp_path / "prometheus.yml").write_text(config.replace("spark.local:8000", f"127.0.0.1:{served.address.port}"))
    port = free_port()
    words = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    with (
        subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], cwd=tmp_path) as process,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        headers = {"Authorization": f"Bearer {key.read_text().strip()}"}

        def left() -> list[str]:
            """Queries without a number for an answer, while the server works."""
            assert client.post(f"{served.url}/completions", json=BODY, headers=headers).status_code == 200
            return [query for query in QUERIES if not number(client, port, query)]

        try:
            until(lambda: left() == [], 120)
        finally:
            process.terminate()


def number(client: httpx.Client, port: int, query: str) -> bool:
    try:
        answer = client.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query})
    except httpx.ConnectError:
        return False
    if answer.status_code == 503:  # it starts
        return False
    said = answer.json()
    assert said["status"] == "success", said
    answers = [row["value"][1] for row in said["data"]["result"]]
    return bool(answers) and ("prefix_cache" in query or "NaN" not in answers)  # this model keeps no prefixes: 0 of 0

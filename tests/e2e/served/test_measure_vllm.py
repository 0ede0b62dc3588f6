"""`invoke prove` at the server of the session; tests/e2e/measure has servers with planted faults, bench and quality."""

from __future__ import annotations

import json

from cpu_stages import Service


def test_prove_finds_nothing_in_a_sound_server(server: Service) -> None:
    asked = server.invoke("prove", server.at().url, "--sessions", "2", "--turns", "2", "--json")
    assert asked.returncode == 0, asked.stderr
    print(asked.stderr)
    assert json.loads(asked.stdout)["verdict"] == "nothing found"

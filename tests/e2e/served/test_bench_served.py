"""`invoke bench` of a release that is being served: by its proxy, with its key, and without an end to it."""

from __future__ import annotations

import json

from cpu_stages import Service


def test_a_service_is_measured_and_goes_on(server: Service) -> None:
    assert not server.at("0.0.0.0").address.is_local
    before = server.container
    found = json.loads(server.invoke("bench", server.last.tag, "--quick", "--json").stdout)
    assert (found["conditions"]["server"], found["start_seconds"]) == ("served", None)
    assert all(row["completed"] and not row["failed"] for row in found["benchmarks"])
    after = server.container
    assert (after.id, after.attrs["State"]["StartedAt"]) == (before.id, before.attrs["State"]["StartedAt"])

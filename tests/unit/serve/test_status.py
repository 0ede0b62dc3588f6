"""What `status` and `logs` show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import made_releases
from evidence_samples import PROJECT

from sparkpin.core.paths import Paths
from sparkpin.releases.record import Releases
from sparkpin.serve import status
from sparkpin.serve.served import Served


def test_logs_leave_out_the_health_check_and_nothing_else() -> None:
    watch = [
        b'INFO:      - "POST /v1/completions HTTP/1.1" 200 OK\n',
        b'INFO:      - "GET /metrics HTTP/1.1" 200 OK\n',
        b'INFO:     172.20.0.1:0 - "GET /health HTTP/1.1" 200 OK\n',
    ]
    told = [
        b'INFO:     172.20.0.1:0 - "POST /v1/completions HTTP/1.1" 200 OK\n',
        b'INFO:      - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n',
        b'INFO:     172.20.0.1:0 - "GET /v1/models HTTP/1.1" 200 OK\n',
        b"no line yet",
    ]
    assert status.told_to_people(b"".join([*watch, *told])) == told


def test_with_nothing_served_the_hint_names_the_one_recipe_that_is_current(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    assert status.how_to_serve(paths) == "invoke up"
    Releases(paths).point(made_releases.release(1, "passed"))
    assert status.how_to_serve(paths) == "invoke serve --recipe tiny"
    Releases(paths).point(made_releases.release(2, "passed", recipe="other"))
    assert status.how_to_serve(paths) == "invoke serve"
    assert status.how_to_serve(paths, "other") == "invoke serve --recipe other"
    assert status.how_to_serve(paths, "qwen3.5-122b") == "invoke serve --recipe qwen3.5-122b"
    assert status.how_to_serve(paths, "nosuch") == "invoke recipe list"


def test_a_server_of_another_home_is_marked(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    own = Served(str(paths.home), "tiny", "sparkpin/tiny:v2-1", "c", "127.0.0.1", 8000, "m", "running", True)
    assert status.row(paths, own, None)[0] == "tiny"
    assert status.row(paths, dataclasses.replace(own, home="/elsewhere"), None)[0] == "tiny (another home)"

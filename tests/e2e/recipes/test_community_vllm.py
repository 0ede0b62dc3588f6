"""What is recorded of a vLLM's command line, held against the parser of the vLLM in the image."""

from __future__ import annotations

import json

import pytest
from checkout import PROJECT
from in_container import output_of
from places import SUPPORT

from sparkpin.build.pair import pair
from sparkpin.host.engine import Engine
from sparkpin.recipes.release import release

SCRIPT = SUPPORT / "vllm_flags.py"


@pytest.mark.slow
def test_the_flags_are_those_of_the_parser() -> None:
    base = pair(PROJECT, "scripted-tiny")[0]
    log = output_of(
        Engine.connect(),
        base.rendered.ref,
        ["python", "/flags.py"],
        volumes={str(SCRIPT): {"bind": "/flags.py", "mode": "ro"}},
        environment={"PYTHONDONTWRITEBYTECODE": "1"},
        tmpfs={"/tmp": "", "/home/sparkpin": "uid=10001"},
    )
    real = json.loads(next(line for line in log.splitlines() if line.startswith("FLAGS ")).removeprefix("FLAGS "))
    known = release(base.stack.vllm)
    assert known.version == known.wanted and len(real) > 300
    assert {name: entry["kind"] for name, entry in real.items()} == {
        name: entry["kind"] for name, entry in known.flags.items()
    }
    for name, entry in real.items():
        assert list(known.flags[name].get("also", [])) == entry["also"], name
        values = set(known.flags[name].get("values", []))
        assert not values or values >= set(entry["choices"]), name

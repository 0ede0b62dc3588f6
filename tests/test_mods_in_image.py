"""The mods' own tests, run where the mods run: in the image that holds them, without a network."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from checkout import PROJECT
from sparkpin.engine import Engine
from sparkpin.pairing import pair

PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
MODS = sorted(path.parent.name for path in (PROJECT / "mods").glob("*/tests"))


@pytest.mark.e2e
@pytest.mark.parametrize("mod", MODS)
def test_mod(mod: str) -> None:
    image = pair(PROJECT, "scripted-tiny")[-1].rendered.ref
    volumes = {str(PROJECT / "mods"): {"bind": "/mods", "mode": "ro"}}
    for name in PYTEST:  # the image has no pytest; it is pure Python, so the host's serves
        spec = importlib.util.find_spec(name)
        assert spec and spec.origin
        origin = Path(spec.origin)
        source, target = (origin.parent, name) if origin.name == "__init__.py" else (origin, origin.name)
        volumes[str(source)] = {"bind": f"/pytest/{target}", "mode": "ro"}
    container = Engine.connect().client.containers.create(
        image,
        ["python", "-m", "pytest", "-p", "no:cacheprovider", "--confcutdir=/mods", "-q", f"/mods/{mod}/tests"],
        environment={"PYTHONPATH": "/pytest", "PYTHONDONTWRITEBYTECODE": "1"},
        volumes=volumes,
        network_mode="none",
        tmpfs={"/tmp": ""},
    )
    try:
        container.start()
        code = container.wait(timeout=600)["StatusCode"]
        assert code == 0, container.logs().decode(errors="replace")[-8000:]
    finally:
        container.remove(force=True)

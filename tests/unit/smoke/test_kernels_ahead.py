"""Kernels that are compiled when an image is built: what the Dockerfile does, what the smoke test demands."""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from checkout import PROJECT
from made_releases import release

from sparkpin.build import render
from sparkpin.cli.smoke import smoke
from sparkpin.core.errors import HostError, InputError, InspectionError, ManifestError, UntoldError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container
from sparkpin.pins import manifests
from sparkpin.pins.mods import KERNELS
from sparkpin.releases import container as running
from sparkpin.releases.record import Demands
from sparkpin.smoke import mods
from sparkpin.smoke.demands import demands_of


def rendered(project: Path, stack: str, stage: str) -> render.RenderedImage:
    loaded = manifests.load_stack(project, stack)
    lock = manifests.load_stack_lock(project, loaded)
    return render.render_chain(project, loaded, lock, manifests.load_chain(project, stage))[-1]


def test_the_image_for_a_gpu_compiles_them_itself_and_the_other_does_not() -> None:
    """By its own Triton, in the folder that it will have: keys and absolute paths are then those at run time."""
    spark = rendered(PROJECT, "spark", "v2")
    assert (
        f"FROM {spark.parent_ref} AS int8-lm-head-kernels\n"
        "USER 0:0\n"
        "COPY --from=int8-lm-head /built/layer/ /\n"
        'RUN ["/opt/vllm/bin/python", "-m", "sparkpin_modkit.ahead", "int8-lm-head", "12.1", '
        '"/opt/sparkpin/kernels/int8-lm-head"]\n'
        "FROM scratch AS int8-lm-head-tree\n"
        "COPY --from=int8-lm-head /built/layer/ /\n"
        "COPY --from=int8-lm-head-kernels /opt/sparkpin/kernels/ /opt/sparkpin/kernels/\n"
    ) in spark.dockerfile
    assert "kernels" not in rendered(PROJECT, "cpu", "v2").dockerfile
    assert "kernels" not in rendered(PROJECT, "spark", "mtp").dockerfile


def test_kernels_belong_to_a_stage_that_has_a_parent() -> None:
    stack = manifests.load_stack(PROJECT, "spark")
    lock = manifests.load_stack_lock(PROJECT, stack)
    chain = manifests.load_chain(PROJECT, "base")
    early = chain[0].model_copy(update={"mods": ["int8-lm-head"]})
    with pytest.raises(ManifestError) as caught:
        render.render(PROJECT, stack, lock, early, None)
    assert caught.value.key == "mods" and "int8-lm-head" in str(caught.value.got)


def test_the_smoke_test_of_a_gpus_stack_asks_where_they_came_from() -> None:
    pin, chain = manifests.load_model(PROJECT, "scripted-tiny"), manifests.load_chain(PROJECT, "v2")
    demanded = {
        name: demands_of(PROJECT, manifests.load_stack(PROJECT, name), chain, pin).kernels for name in ("spark", "cpu")
    }
    assert demanded == {"spark": ("int8-lm-head",), "cpu": ()}
    assert demands_of(PROJECT, manifests.load_stack(PROJECT, "spark"), chain[:1], pin).kernels == ()


def line(**value: object) -> bytes:
    return b"(Worker pid=1) INFO SPARKPIN_MOD " + json.dumps({"mod": "a"} | value).encode() + b"\x1b[0m\n"


def came(total: int, image: int, *compiled: str) -> bytes:
    return line(event="kernels", total=total, image=image, cached=0, compiled=compiled)


GOOD = came(8, 8)


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        (GOOD, []),
        (line(event="active"), ["mod a does not say where its kernels came from"]),
        (came(8, 6, "head", "head"), ["mod a: 6 of 8 kernels from the image; compiled now: head"]),
        (GOOD + came(8, 7), ["mod a: 7 of 8 kernels from the image; compiled now: none"]),
        (GOOD + line(event="compiled", kernel="head") * 2, ["mod a: kernel head was compiled after the start"]),
        (b"SPARKPIN_MOD {broken\n" + GOOD, []),  # the check `mods` tells that line
    ],
)
def test_what_the_smoke_test_finds_in_a_log(log: bytes, wanted: list[str]) -> None:
    assert mods.kernel_faults(mods.reports(log), ["a"]) == wanted
    assert mods.kernel_summaries(mods.reports(GOOD)) == {"a": "8 of 8 kernels from the image"}


MODS = [path.name for path in sorted((PROJECT / "mods").iterdir()) if (path / "pyproject.toml").is_file()]


@pytest.mark.parametrize("mod", MODS)
def test_kernels_are_entered_under_the_name_of_the_mod_s_folder(mod: str) -> None:
    """By which the image's build asks for them."""
    pyproject = tomllib.loads((PROJECT / "mods" / mod / "pyproject.toml").read_text())
    assert set(pyproject["project"].get("entry-points", {}).get(KERNELS, {})) <= {mod}


DEMANDS = Demands(
    checks=("chat",), mods=("turboquant",), acceptance_floor=None, scripted=False, kernels=("turboquant",)
)
WITH_KERNELS = release(1, demands=DEMANDS)
TABLE = b"GPU            NVIDIA GB10\nattend, merge  3 query tokens  0.0034    0.01    ok      0.10\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A machine whose engine has the release's image."""
    monkeypatch.setattr(mods, "obstacle", lambda *asked, **more: "")
    monkeypatch.setattr(mods, "exclusive_run", lambda *asked: contextlib.nullcontext())
    monkeypatch.setattr(running, "require_here", lambda engine: None)
    monkeypatch.setattr(running, "require_image", lambda engine, one: None)
    monkeypatch.setattr(running, "cache_volume", lambda engine, one: "cache")
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    paths.home.mkdir()
    return paths


def compared(
    site: Paths, monkeypatch: pytest.MonkeyPatch, code: int, log: bytes, status: str = "exited"
) -> tuple[str, dict[str, Any]]:
    """What `compare` gives where the container ends like this, and what the container was given."""
    given: dict[str, Any] = {}

    def container_of(*asked: Any, **settings: Any) -> Any:
        given.update(settings)
        container = Container({"Id": "1", "State": {"Status": status, "ExitCode": code}})
        return contextlib.nullcontext(container)

    monkeypatch.setattr(mods, "container_of", container_of)
    monkeypatch.setattr(Container, "reload", lambda self: None)
    monkeypatch.setattr(running, "log_of", lambda container: log)
    monkeypatch.setattr(running, "stays_down", lambda container: False)
    engine: Any = None
    return mods.compare_kernels(site, engine, WITH_KERNELS, limit=0.5), given


def test_kernels_are_compared_in_the_image_on_the_gpu_and_nothing_else(
    site: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, given = compared(site, monkeypatch, 0, b'SPARKPIN_MOD {"mod":"x","event":"kernels"}\n' + TABLE)
    assert WITH_KERNELS.image in table and "3 query tokens" in table and "SPARKPIN_MOD" not in table
    assert given["device_requests"] and given["network_mode"] == "none" and given["read_only"]
    assert given["command"] == ["-m", "sparkpin_modkit.selfcheck"] and list(given["volumes"]) == ["cache"]


@pytest.mark.parametrize(
    ("code", "log", "status", "error"),
    [
        (78, TABLE + b"store  all  0.5  0.002  FAILED\n", "exited", InspectionError),
        (1, TABLE + b"Traceback: an illegal memory access\n", "exited", InspectionError),
        (0, TABLE, "running", InspectionError),
        (69, b"nothing to compare: torch finds no GPU\n", "exited", HostError),
    ],
)
def test_what_else_may_come_of_it(
    site: Paths, monkeypatch: pytest.MonkeyPatch, code: int, log: bytes, status: str, error: type[Exception]
) -> None:
    """What came of the table is told: it is what an owner sends."""
    with pytest.raises(error) as caught:
        compared(site, monkeypatch, code, log, status)
    assert log.decode().splitlines()[-1].split(":")[-1] in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"tag": "v2", "inspect": True}, {"tag": "v2", "recipe": "tiny"}], ids=str)
def test_kernels_are_of_one_release_and_nothing_else_is_done(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        smoke(Paths.from_env(), kernels=True, **options)


def test_a_release_without_kernels_has_nothing_to_compare(site: Paths) -> None:
    engine: Any = None
    with pytest.raises(UntoldError):
        mods.compare_kernels(site, engine, release(3))

"""Where the files of an image come from: a folder or an archive; and `invoke smoke TAG --inspect`."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import PROJECT
from elf_samples import CUBIN, GPU, SAMPLE_ROOT, SPECIFIC, Elf, container, entry, facts_of, put, server_files
from heard import heard
from made_releases import release
from tiny_images import make_rootfs

from sparkpin.build.pair import pair
from sparkpin.cli.smoke import inspect_image
from sparkpin.core.errors import InputError, InspectionError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Releases
from sparkpin.smoke.inspect.run import Opened, demands_of, pins_of
from sparkpin.smoke.inspect.run import inspect as examined
from sparkpin.smoke.inspect.scan import scan
from sparkpin.smoke.inspect.tree import in_archive

Task = Callable[..., tuple[str, SparkpinError | None]]


def test_an_archive_comes_to_the_same_as_the_folder(tmp_path: Path) -> None:
    folder = put(tmp_path / "root", SAMPLE_ROOT)
    hard = ("module.so", "twin.so")
    os.link(folder / "opt/app/module.so", folder / "opt/app/twin.so")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(folder, ".")
    pieces = [out.getvalue()[start : start + 999] for start in range(0, len(out.getvalue()), 999)]
    from_archive = scan(in_archive(pieces, tmp_path))
    os.unlink(folder / "opt/app/twin.so")
    from_folder = facts_of(folder)
    links = {path: link for path, link in from_archive.links.items() if path.split("/")[-1] not in hard}
    assert links == from_folder.links
    for part in ("packages", "torch"):
        assert getattr(from_archive, part) == getattr(from_folder, part)
    libraries = {path.replace("twin", "module"): library.code for path, library in from_archive.libraries.items()}
    assert libraries == {path: library.code for path, library in from_folder.libraries.items()}
    assert set(from_archive.broken) == set(from_folder.broken) == {"opt/app/broken.so"}
    with pytest.raises(InspectionError, match="archive"):
        scan(in_archive([b"".join(pieces)[:1500]], tmp_path))


@pytest.fixture
def inspect_task(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Task:
    """What `invoke smoke --inspect` prints, and how it fails; without an engine."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    def run(subject: object, sm: int | None = None, as_json: bool = True) -> tuple[str, SparkpinError | None]:
        failed = None
        try:
            inspect_image(Paths.from_env(), str(subject), sm=sm, as_json=as_json)
        except SparkpinError as error:
            failed = error
        return capsys.readouterr().out, failed

    return run


@pytest.mark.parametrize(
    ("content", "sm", "rules"),
    [
        ({}, None, {"files"}),
        ({"readme.md": b"text"}, None, {"files"}),
        ({"lib.so": GPU}, None, {"packages"}),
        ({"good.so": GPU, **server_files(cuda=None)}, 121, {"torch"}),
        ({"good.so": GPU, **server_files(cuda=None)}, None, set()),
        ({"good.so": GPU, "bad.so": Elf(gpu=container(entry(CUBIN, 120, SPECIFIC))), **server_files()}, 121, {"gpu"}),
    ],
)
def test_what_cannot_serve_does_not_pass(
    tmp_path: Path, inspect_task: Task, content: dict[str, bytes | Elf | str], sm: int | None, rules: set[str]
) -> None:
    (tmp_path / "root").mkdir()
    out, failed = inspect_task(put(tmp_path / "root", content), sm=sm)
    result = json.loads(out)
    assert {one["rule"] for one in result["findings"] if one["severity"] == "error"} == rules
    assert result["passed"] == (failed is None) == (not rules)
    assert failed is None or (failed.exit_code == 14 and failed.next_step)


def test_the_task_on_a_folder(tmp_path: Path, inspect_task: Task) -> None:
    root = put(tmp_path / "root", {"good.so": GPU, **server_files()})
    out, failed = inspect_task(root, sm=121)
    result = json.loads(out)
    assert failed is None
    assert (result["passed"], result["sm"], result["platform"], result["libraries"]) == (True, 121, "linux/arm64", 1)
    assert result["gpu"] == [
        {"path": "good.so", "runs": 1, "compiles": 0, "neither": 0, "archs": {"sm_120": 1}, "verdict": "runs"}
    ]
    put(root, {"opt/site-packages/b\x1b[2Jad.so": Elf(gpu=container(entry(CUBIN, 120, SPECIFIC)))})
    out, failed = inspect_task(root, sm=121, as_json=False)
    assert isinstance(failed, InspectionError)
    assert "sm_120a" in next(line for line in out.splitlines() if line.startswith("ERROR"))
    assert "\x1b" not in out, "what lies in an image does not reach the terminal as it is"


def test_a_gpu_that_there_is_not_is_refused_before_the_engine_is_asked(inspect_task: Task) -> None:
    assert isinstance(inspect_task("sparkpin/none:such", sm=122)[1], InputError)


def test_what_an_image_must_have_comes_from_its_stack_and_stage(project: Path, tmp_path: Path) -> None:
    paths, told = Paths(project, tmp_path / "cache", tmp_path / "home"), heard()
    labelled = Opened(iter(()), "linux/amd64", stack="cpu", stage="hybrid")
    mods = ["sparkpin-modkit", "sparkpin-guard", "vllm", "sparkpin-hybrid-int4-fp8"]
    assert demands_of(paths, labelled) == (None, mods)
    with (project / "pins/stacks/cpu.yaml").open("a") as file:
        file.write('gpu: {sm: "12.1", cuda: "13.0"}\n')
    assert demands_of(paths, labelled) == (121, mods)
    unknown = Opened(iter(()), "linux/amd64", stack="elsewhere", stage="hybrid")
    assert demands_of(paths, unknown) == (None, [])
    assert len(told) == 1


def test_a_release_is_compared_with_its_own_pins(project: Path, tmp_path: Path) -> None:
    paths, told = Paths(project, tmp_path / "cache", tmp_path / "home"), heard()
    last = pair(project, "scripted-tiny", stage="mtp")[-1]
    made = release(1, inputs=last.inputs, executable=last.executable)
    KeptInputs.of(paths).keep_project(project, made.inputs)
    Releases(paths).save(made)
    opened = Opened(iter(()), "linux/amd64", stack="cpu", stage="mtp")
    (project / "stages/mtp.yaml").write_text((project / "stages/mtp.yaml").read_text() + "mods: [turboquant]\n")
    before = ["sparkpin-modkit", "sparkpin-guard", "vllm", "sparkpin-hybrid-int4-fp8"]
    with pins_of(paths, made.tag) as then:
        assert demands_of(then, opened)[1] == before
    with pins_of(paths, "sparkpin/whatever:1") as then:
        assert demands_of(then, opened)[1] == [*before, "sparkpin-turboquant"]
    assert told == []
    shutil.rmtree(paths.inputs)
    with pins_of(paths, made.tag) as then:
        assert then == paths
    assert len(told) == 1


def test_a_shell_of_this_machine_has_all_that_it_needs(tmp_path: Path) -> None:
    """Real programs and libraries, taken from here with what ldd names."""
    (tmp_path / "root").mkdir()
    subprocess.run(["tar", "-xf", make_rootfs(tmp_path / "rootfs.tar"), "-C", tmp_path / "root"], check=True)
    machine = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[os.uname().machine]
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    result = examined(paths, None, str(tmp_path / "root"), sm=None)
    assert (result.platform, [one.text for one in result.errors if one.rule != "packages"]) == (machine, [])
    library = next((tmp_path / "root").rglob("libc.so.6"))
    library.unlink()
    worse = examined(paths, None, str(tmp_path / "root"), sm=None)
    assert [finding.what for finding in worse.errors if finding.rule == "needed"] == ["libc.so.6"]

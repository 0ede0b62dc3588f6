"""Where the files of an image come from: a folder, overlay's folders, an archive, a real engine; and the task."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import PROJECT
from elf_samples import CUBIN, PLAIN, SPECIFIC, Elf, container, entry
from made_releases import built, release
from tiny_images import make_rootfs

from sparkpin.build.pair import pair
from sparkpin.core.errors import InputError, InspectionError
from sparkpin.core.paths import Paths
from sparkpin.host import image_files
from sparkpin.host.engine import Engine
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Releases
from sparkpin.smoke.inspect.elf import read_library
from sparkpin.smoke.inspect.finding import ImageFinding
from sparkpin.smoke.inspect.image import Opened, open_image
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.run import inspect, known_sm, mods_of, pins_of, ref_of, show, sm_of
from sparkpin.smoke.inspect.scan import ImageFacts, scan
from sparkpin.smoke.inspect.tree import in_archive, in_folders, real

pytest_plugins = ["empty_engine"]
GPU = Elf(gpu=container(entry(CUBIN, 120, PLAIN)))


def quiet(line: str) -> None:
    pass


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755)


def seen(facts: ImageFacts) -> tuple[object, ...]:
    return facts.libraries, facts.links, facts.packages, facts.torch, facts.broken, facts.searched


def sample(folder: Path) -> Path:
    put(folder / "usr/lib/libreal.so.1", bytes(Elf(soname="libreal.so.1", defined=["one"])))
    (folder / "usr/lib/libreal.so").symlink_to("libreal.so.1")
    put(folder / "opt/app/module.so", bytes(GPU))
    put(folder / "opt/app/broken.so", bytes(GPU)[:200])
    put(folder / "opt/app/script.sh", b"#!/bin/sh\necho not a library\n")
    put(folder / "opt/site-packages/made-1.dist-info/METADATA", b"Name: made\nVersion: 1\n")
    put(folder / "etc/ld.so.conf", b"/opt/app\n")
    return folder


def test_an_archive_comes_to_the_same_as_the_folder(tmp_path: Path) -> None:
    folder = sample(tmp_path / "root")
    os.link(folder / "opt/app/module.so", folder / "opt/app/twin.so")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(folder, ".")
    pieces = [out.getvalue()[start : start + 999] for start in range(0, len(out.getvalue()), 999)]
    from_archive = scan(in_archive(pieces, tmp_path), quiet)
    os.unlink(folder / "opt/app/twin.so")
    twin = from_archive.links.pop("opt/app/twin.so", "") or from_archive.links.pop("opt/app/module.so", "")  # type: ignore[attr-defined]
    assert twin in ("/opt/app/module.so", "/opt/app/twin.so")
    from_folder = scan(in_folders([folder]), quiet)
    libraries = {path.replace("twin", "module"): library.code for path, library in from_archive.libraries.items()}
    assert libraries == {path: library.code for path, library in from_folder.libraries.items()}
    assert seen(from_archive)[1:4] == seen(from_folder)[1:4]
    assert set(from_archive.broken) == {"opt/app/broken.so"}
    with pytest.raises(InspectionError, match="the archive cannot be read"):
        scan(in_archive([b"".join(pieces)[:1500]], tmp_path), quiet)


def test_layers_over_each_other(tmp_path: Path) -> None:
    """As overlay2 keeps them: what is above hides what is below; deletion marks and opaque folders work."""
    if os.geteuid() != 0:
        pytest.skip("makes deletion marks, which are devices: run as root")
    low, high = sample(tmp_path / "low"), tmp_path / "high"
    put(low / "opt/gone/a.so", bytes(GPU))
    put(low / "opt/hidden/below.so", bytes(GPU))
    put(low / "opt/turned/into.so", bytes(GPU))
    put(high / "opt/app/module.so", bytes(Elf(soname="newer.so")))
    put(high / "opt/hidden/above.so", bytes(GPU))
    put(high / "opt/turned", b"a file now")
    os.mknod(high / "opt/gone", 0o020000, os.makedev(0, 0))
    os.mknod(high / "opt/app/broken.so", 0o020000, os.makedev(0, 0))
    os.setxattr(high / "opt/hidden", "trusted.overlay.opaque", b"y")
    facts = scan(in_folders([high, low]), quiet)
    assert sorted(facts.libraries) == ["opt/app/module.so", "opt/hidden/above.so", "usr/lib/libreal.so.1"]
    assert facts.libraries["opt/app/module.so"].soname == "newer.so"
    assert facts.broken == {}


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/lib/x/../libc.so", "usr/lib/libc.so.6"),
        ("bin/../lib/libc.so", "usr/lib/libc.so.6"),
        ("/up/passwd", "etc/passwd"),
        ("/loop/x", ""),
        ("no/link", "no/link"),
    ],
)
def test_links_are_followed_inside_the_image(path: str, wanted: str) -> None:
    links = {"lib": "usr/lib", "usr/lib/libc.so": "libc.so.6", "up": "../../etc", "loop": "/round", "round": "loop"}
    assert real(path, links) == wanted


@pytest.fixture
def image(tmp_path: Path) -> Iterator[tuple[Engine, str]]:
    """A real image of two layers for arm64, which this machine need not be able to run."""
    engine, name = Engine.connect(), f"sparkpin-test/inspect:{uuid.uuid4().hex[:12]}"
    folder = sample(tmp_path / "root")
    with tarfile.open(tmp_path / "rootfs.tar", "w") as tar:
        tar.add(folder, ".")
    engine.import_rootfs(tmp_path / "rootfs.tar", f"{name}-base", architecture="arm64", labels={})
    context = tmp_path / "context"
    put(context / "above.so", bytes(GPU))
    lines = [f"FROM {name}-base", "COPY above.so /opt/above.so", "ENV LD_LIBRARY_PATH=/opt/app", "LABEL a=b"]
    (context / "Dockerfile").write_text("\n".join(lines))
    engine.client.images.build(path=str(context), tag=name, platform="linux/arm64", rm=True, forcerm=True)
    yield engine, name
    engine.untag(name)
    engine.untag(f"{name}-base")


@pytest.mark.engine
def test_an_image_reads_the_same_from_its_layers_and_from_an_export(
    image: tuple[Engine, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, name = image
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    told: list[str] = []
    found = []
    for _ in range(2):
        with open_image(paths, engine, name, told.append) as opened:
            assert (opened.platform, opened.env["LD_LIBRARY_PATH"]) == ("linux/arm64", "/opt/app")
            found.append(scan(opened.files, quiet, opened.env))
        monkeypatch.setattr(image_files, "layer_folders", lambda engine, ref: ())
    assert told[-1] == "the engine exports the files"
    assert set(found[0].libraries) == {"opt/above.so", "opt/app/module.so", "usr/lib/libreal.so.1"}
    assert {**found[0].libraries} == {**found[1].libraries}
    assert seen(found[0])[2:] == seen(found[1])[2:]
    assert not engine.client.containers.list(all=True, filters={"ancestor": name})
    assert not list((tmp_path / "cache/work").glob("saved-*"))


def invoke(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "invoke", "inspect", *argv],
        cwd=PROJECT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def put_server(root: Path, cuda: str | None = "13.0") -> None:
    """What says that vLLM and PyTorch are there."""
    put(root / "opt/site-packages/vllm-0.33.0.dist-info/METADATA", b"Name: vllm\nVersion: 0.33.0\n")
    put(root / "opt/site-packages/torch/version.py", f"__version__ = '2.14.0'\ncuda = {cuda!r}\n".encode())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "no library and no program is in it"),
        ({"readme.md": b"text"}, "no library and no program is in it"),
        ({"lib.so": bytes(GPU)}, "no vLLM and no PyTorch in it: it serves nothing"),
    ],
    ids=["empty", "no-root", "no-server"],
)
def test_what_cannot_serve_does_not_pass(tmp_path: Path, content: dict[str, bytes], words: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name, data in content.items():
        put(root / name, data)
    done = invoke(str(root), "--platform", "linux/arm64")
    assert done.returncode == InspectionError.exit_code and words in done.stdout, done.stderr
    assert "whole root file system" in done.stderr or "usr/ and opt/" in done.stderr


def test_an_image_without_cuda_does_not_pass_for_a_gpu(tmp_path: Path) -> None:
    root = tmp_path / "root"
    put(root / "good.so", bytes(GPU))
    put_server(root, cuda=None)
    done = invoke(str(root), "--sm", "121")
    assert done.returncode == InspectionError.exit_code
    assert "PyTorch 2.14.0 is built without CUDA: it runs nothing on sm_121" in done.stdout
    assert invoke(str(root)).returncode == 0


def test_the_task_on_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "root/good.so", bytes(GPU))
    put_server(tmp_path / "root")
    done = invoke(str(tmp_path / "root"), "--sm", "12.1", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["passed"], told["sm"], told["platform"], told["libraries"]) == (True, 121, "linux/arm64", 1)
    assert told["gpu"] == [
        {"path": "good.so", "runs": 1, "compiles": 0, "neither": 0, "archs": {"sm_120": 1}, "verdict": "runs"}
    ]
    assert told["verdict"] == "inspected for sm_121: 0 errors, 0 warnings, 1 note, 0 allowed with a reason"
    put(tmp_path / "root/opt/site-packages/bad.so", bytes(Elf(gpu=container(entry(CUBIN, 120, SPECIFIC)))))
    bad = invoke(str(tmp_path / "root"), "--sm", "121")
    assert bad.returncode == InspectionError.exit_code == 14
    verdict = "fails for sm_121: 1 error, 0 warnings, 1 note, 0 allowed with a reason"
    assert (bad.stdout + bad.stderr).count(verdict) == bad.stderr.count(f"root {verdict}") == 1
    assert "\n1 library has code for sm_121, 0 PTX only, 1 none\n" in bad.stdout
    assert "good.so" not in bad.stdout
    row = "ERROR  gpu   bad.so  nothing in it runs on sm_121: it holds sm_120a"
    assert row.split() == next(line.split() for line in bad.stdout.splitlines() if line.startswith("ERROR"))
    assert "next: take a build with sm_121" in bad.stderr and "Traceback" not in bad.stderr
    assert json.loads(invoke(str(tmp_path / "root"), "--sm", "121", "--json").stdout)["passed"] is False


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--sm", "blackwell", "wanted a GPU's compute capability: 121, 12.1 or sm_121 (DGX Spark)"),
        ("--platform", "linux/mips", "--platform: saw 'linux/mips'"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, option: str, value: str, words: str) -> None:
    """Refused at once: an engine that is nowhere is not asked for the image."""
    done = invoke("sparkpin/none:such", option, value, env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("asked", ["121", "12.1", "sm_121"])
def test_a_gpu_is_named_as_one_likes(asked: str) -> None:
    assert known_sm(asked) == 121


@pytest.mark.parametrize("asked", ["999", "12", "1.21", "sm_12.1", "sm_", "121a", "122", "12.10", "\u0661\u0662\u0661"])
def test_a_gpu_that_there_is_not_is_refused(asked: str) -> None:
    with pytest.raises(InputError, match=r"wanted a GPU's compute capability: 121, 12\.1 or sm_121"):
        known_sm(asked)


def test_a_subject_that_cannot_be(tmp_path: Path) -> None:
    """Without an engine, too: a path can only be a folder."""
    none = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    may_be = "TAG may be a release, another image of the engine, or a folder with a root file system"
    for name in ("/nowhere", "Upper Case"):
        nowhere = invoke(name, env=none)
        assert nowhere.returncode == 2 and f"error: there is no folder {name!r}; {may_be}" in nowhere.stderr
    (tmp_path / "image.tar").write_bytes(b"")
    file = invoke(str(tmp_path / "image.tar"), env=none)
    assert file.returncode == 2 and f"error: {tmp_path}/image.tar is a file; {may_be}" in file.stderr


def test_what_is_told_without_and_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = scan([], quiet)
    libraries = {name: read_library(io.BytesIO(bytes(GPU)), name) for name in ("one.so", "two.so")}
    why = "nothing loads it"
    findings = (
        ImageFinding("warning", "needed", "two.so", "libx.so lies on no search path"),
        *(ImageFinding("allowed", "gpu", name, "nothing in it runs", why=why) for name in ("old.so", "older.so")),
    )
    result = Result("sparkpin/x:1", "linux/arm64", 121, replace(found, libraries=libraries), findings)
    show(result, everything=False, as_json=False)
    brief = capsys.readouterr().out
    assert brief.splitlines()[1] == "vLLM none; torch none"
    assert brief.splitlines()[-4:] == [
        "2 libraries have code for sm_121, 0 PTX only, 0 none",
        "2 findings allowed with a reason",
        "each of them: invoke inspect sparkpin/x:1 --all",
        "inspected for sm_121: 0 errors, 1 warning, 0 notes, 2 allowed with a reason",
    ]
    assert "libx.so lies on no search path" in brief and "one.so" not in brief and why not in brief
    show(result, everything=True, as_json=False)
    whole = capsys.readouterr().out
    assert "1 sm_120" in whole and "old.so and 1 more" in whole and why in whole and "--all" not in whole
    assert whole.splitlines()[-1] == brief.splitlines()[-1]


def test_what_an_image_must_have_is_said_by_its_stack_and_stage(project: Path, tmp_path: Path) -> None:
    paths, told = Paths(project, tmp_path / "cache", tmp_path / "home"), list[str]()
    labelled = Opened(iter(()), "linux/amd64", stack="cpu", stage="hybrid")
    assert sm_of(paths, labelled, told.append) is None
    with (project / "pins/stacks/cpu.yaml").open("a") as file:
        file.write('gpu: {sm: "12.1", cuda: "13.0"}\n')
    assert sm_of(paths, labelled, told.append) == 121
    assert mods_of(paths, labelled, told.append) == ["sparkpin-modkit", "vllm", "sparkpin-hybrid-int4-fp8"]
    unknown = Opened(iter(()), "linux/amd64", stack="elsewhere", stage="hybrid")
    assert (sm_of(paths, unknown, told.append), mods_of(paths, unknown, told.append)) == (None, [])
    assert told == [
        "note: which GPU the image is for is not known here, so its GPU code is not judged: unknown stack 'elsewhere'",
        "note: which mods belong into the image is not known here: unknown stack 'elsewhere'",
    ]


def test_a_release_is_held_against_its_own_pins(project: Path, tmp_path: Path) -> None:
    paths, told = Paths(project, tmp_path / "cache", tmp_path / "home"), list[str]()
    last = pair(project, "scripted-tiny")[-1]
    made = release(1, inputs=last.inputs, executable=last.executable)
    KeptInputs.of(paths).keep_project(project, made.inputs)
    Releases(paths).save(made)
    opened = Opened(iter(()), "linux/amd64", stack="cpu", stage="mtp")
    (project / "stages/mtp.yaml").write_text((project / "stages/mtp.yaml").read_text() + "mods: [turboquant]\n")
    before = ["sparkpin-modkit", "vllm", "sparkpin-hybrid-int4-fp8"]
    with pins_of(paths, made.tag, told.append) as then:
        assert mods_of(then, opened, told.append) == before
    with pins_of(paths, "sparkpin/whatever:1", told.append) as then:
        assert mods_of(then, opened, told.append) == [*before, "sparkpin-turboquant"]
    assert told == []
    shutil.rmtree(paths.inputs)
    with pins_of(paths, made.tag, told.append) as then:
        assert then == paths
    assert told[0].startswith("note: held against today's pins, not its own: ")


@pytest.mark.engine
def test_of_releases_with_one_name_those_are_offered_that_can_be_inspected(
    empty_engine: Engine, tmp_path: Path
) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    one, two, gone = (built(paths, empty_engine, number, recipe=f"r{number}") for number in (1, 2, 3))
    empty_engine.client.api.remove_image(gone.image, force=True)
    with pytest.raises(InputError, match="'v2' may be of several recipes") as caught:
        ref_of(paths, empty_engine, "v2")
    assert caught.value.next_step == f"choose one of: {one.tag}, {two.tag}"
    empty_engine.client.api.remove_image(two.image, force=True)
    assert ref_of(paths, empty_engine, "v2") == one.tag, "the only one"
    with pytest.raises(InputError, match="the engine has no image") as caught:
        ref_of(paths, empty_engine, gone.name)
    assert caught.value.next_step == f"invoke rebuild {gone.tag}"
    empty_engine.client.api.remove_image(one.image, force=True)
    with pytest.raises(InputError, match="'v2' may be of several recipes") as caught:
        ref_of(paths, empty_engine, "v2")
    assert caught.value.next_step == f"invoke rebuild TAG, with one of: {one.tag}, {two.tag}, {gone.tag}"


@pytest.mark.e2e
def test_the_image_of_the_cpu_stack_passes() -> None:
    ref = pair(PROJECT, "scripted-tiny")[-1].rendered.ref
    result = inspect(Paths.from_env(PROJECT), Engine.connect(), ref, sm="", platform="", say=quiet)
    assert result.errors == [] and result.sm is None
    assert len(result.facts.libraries) > 500
    plugins = {package.name: package.accepts for package in result.facts.packages if package.accepts}
    assert set(plugins) == {"vllm", "sparkpin-hybrid-int4-fp8", "sparkpin-int8-lm-head", "sparkpin-turboquant"}
    assert all(finding.why for finding in result.findings if finding.severity == "allowed")


def test_a_shell_of_this_machine_has_all_that_it_needs(tmp_path: Path) -> None:
    """Real programs and libraries, taken from here with what ldd names."""
    (tmp_path / "root").mkdir()
    subprocess.run(["tar", "-xf", make_rootfs(tmp_path / "rootfs.tar"), "-C", tmp_path / "root"], check=True)
    machine = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[os.uname().machine]
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    result = inspect(paths, None, str(tmp_path / "root"), sm="", platform="", say=quiet)
    assert (result.platform, [one.text for one in result.errors if one.rule != "packages"]) == (machine, [])
    library = next((tmp_path / "root").rglob("libc.so.6"))
    library.unlink()
    worse = inspect(paths, None, str(tmp_path / "root"), sm="", platform="", say=quiet)
    assert [finding.what for finding in worse.errors if finding.rule == "needed"] == ["libc.so.6"]

"""Where the files of an image come from: a folder, overlay's folders, an archive; and the task."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import PROJECT
from elf_samples import CUBIN, GPU, SAMPLE_ROOT, SPECIFIC, Elf, container, entry, facts_of, put, server_files
from made_releases import release
from tiny_images import make_rootfs

from sparkpin.build.pair import pair
from sparkpin.commands.inspect import inspect, known_sm, show
from sparkpin.core.errors import InputError, InspectionError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Releases
from sparkpin.smoke.inspect.elf import read_library
from sparkpin.smoke.inspect.finding import ImageFinding
from sparkpin.smoke.inspect.image import Opened
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.run import inspect as examined
from sparkpin.smoke.inspect.run import mods_of, pins_of, sm_of
from sparkpin.smoke.inspect.scan import ImageFacts, scan
from sparkpin.smoke.inspect.tree import in_archive, in_folders, real

Task = Callable[..., tuple[str, SparkpinError | None]]


def seen(facts: ImageFacts) -> tuple[object, ...]:
    return facts.libraries, facts.links, facts.packages, facts.torch, facts.broken, facts.searched


def test_an_archive_comes_to_the_same_as_the_folder(tmp_path: Path) -> None:
    folder = put(tmp_path / "root", SAMPLE_ROOT)
    os.link(folder / "opt/app/module.so", folder / "opt/app/twin.so")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(folder, ".")
    pieces = [out.getvalue()[start : start + 999] for start in range(0, len(out.getvalue()), 999)]
    from_archive = scan(in_archive(pieces, tmp_path), len)
    os.unlink(folder / "opt/app/twin.so")
    twin = from_archive.links.pop("opt/app/twin.so", "") or from_archive.links.pop("opt/app/module.so", "")  # type: ignore[attr-defined]
    assert twin in ("/opt/app/module.so", "/opt/app/twin.so")
    from_folder = facts_of(folder)
    libraries = {path.replace("twin", "module"): library.code for path, library in from_archive.libraries.items()}
    assert libraries == {path: library.code for path, library in from_folder.libraries.items()}
    assert seen(from_archive)[1:4] == seen(from_folder)[1:4]
    assert set(from_archive.broken) == {"opt/app/broken.so"}
    with pytest.raises(InspectionError, match="the archive cannot be read"):
        scan(in_archive([b"".join(pieces)[:1500]], tmp_path), len)


def test_layers_over_each_other(tmp_path: Path) -> None:
    """As overlay2 keeps them: what is above hides what is below; deletion marks and opaque folders work."""
    if os.geteuid() != 0:
        pytest.skip("makes deletion marks, which are devices: run as root")
    below = {f"opt/{name}.so": GPU for name in ("gone/a", "hidden/below", "turned/into")}
    low = put(tmp_path / "low", SAMPLE_ROOT | below)
    above = {"opt/app/module.so": Elf(soname="newer.so"), "opt/hidden/above.so": GPU, "opt/turned": "a file now"}
    high = put(tmp_path / "high", above)
    os.mknod(high / "opt/gone", 0o020000, os.makedev(0, 0))
    os.mknod(high / "opt/app/broken.so", 0o020000, os.makedev(0, 0))
    os.setxattr(high / "opt/hidden", "trusted.overlay.opaque", b"y")
    facts = scan(in_folders([high, low]), len)
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
def inspect_task(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Task:
    """What `invoke inspect` prints, and how it fails; without an engine."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    def run(
        subject: object, sm: str = "", platform: str = "", as_json: bool = False
    ) -> tuple[str, SparkpinError | None]:
        failed = None
        try:
            inspect(str(subject), sm=sm, platform=platform, everything=False, as_json=as_json)
        except SparkpinError as error:
            failed = error
        return capsys.readouterr().out, failed

    return run


@pytest.mark.parametrize(
    ("content", "sm", "words"),
    [
        ({}, "", "no library and no program is in it"),
        ({"readme.md": b"text"}, "", "no library and no program is in it"),
        ({"lib.so": GPU}, "", "no vLLM and no PyTorch in it: it serves nothing"),
        ({"good.so": GPU, **server_files(cuda=None)}, "121", "PyTorch 2.14.0 is built without CUDA"),
        ({"good.so": GPU, **server_files(cuda=None)}, "", ""),
    ],
)  # fmt: skip
def test_what_cannot_serve_does_not_pass(
    tmp_path: Path, inspect_task: Task, content: dict[str, bytes | Elf | str], sm: str, words: str
) -> None:
    (tmp_path / "root").mkdir()
    out, failed = inspect_task(put(tmp_path / "root", content), sm=sm, platform="linux/arm64")
    assert isinstance(failed, InspectionError) == bool(words) and words in out


def test_the_task_on_a_folder(tmp_path: Path, inspect_task: Task) -> None:
    root = put(tmp_path / "root", {"good.so": GPU, **server_files()})
    out, failed = inspect_task(root, sm="12.1", as_json=True)
    told = json.loads(out)
    assert failed is None
    assert (told["passed"], told["sm"], told["platform"], told["libraries"]) == (True, 121, "linux/arm64", 1)
    assert told["gpu"] == [
        {"path": "good.so", "runs": 1, "compiles": 0, "neither": 0, "archs": {"sm_120": 1}, "verdict": "runs"}
    ]
    assert told["verdict"] == "inspected for sm_121: 0 errors, 0 warnings, 1 note, 0 allowed with a reason"
    put(root, {"opt/site-packages/bad.so": Elf(gpu=container(entry(CUBIN, 120, SPECIFIC)))})
    out, failed = inspect_task(root, sm="121")
    verdict = "fails for sm_121: 1 error, 0 warnings, 1 note, 0 allowed with a reason"
    assert isinstance(failed, InspectionError) and failed.message == f"{root} {verdict}" and failed.exit_code == 14
    assert failed.next_step.startswith("take a build with sm_121")
    assert "\n1 library has code for sm_121, 0 PTX only, 1 none\n" in out
    assert verdict not in out and "good.so" not in out
    row = "ERROR  gpu   bad.so  nothing in it runs on sm_121: it holds sm_120a"
    assert row.split() == next(line.split() for line in out.splitlines() if line.startswith("ERROR"))
    out, failed = inspect_task(root, sm="121", as_json=True)
    assert failed and json.loads(out)["passed"] is False


@pytest.mark.parametrize(
    ("subject", "options", "words"),
    [
        ("sparkpin/none:such", {"sm": "blackwell"}, "--sm: saw 'blackwell'"),
        ("sparkpin/none:such", {"platform": "linux/mips"}, "--platform: saw 'linux/mips'"),
        ("/nowhere", {}, "there is no folder '/nowhere'"),
        ("Upper Case", {}, "there is no folder 'Upper Case'"),
        (os.path.relpath(__file__), {}, f"{os.path.relpath(__file__)} is a file"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    inspect_task: Task, subject: str, options: dict[str, str], words: str
) -> None:
    """An engine that is nowhere is not asked for the image."""
    _, failed = inspect_task(subject, **options)
    assert isinstance(failed, InputError) and words in failed.message


@pytest.mark.parametrize("asked", ["121", "12.1", "sm_121"])
def test_a_gpu_is_named_as_one_likes(asked: str) -> None:
    assert known_sm(asked) == 121


@pytest.mark.parametrize("asked", ["999", "12", "1.21", "sm_12.1", "sm_", "121a", "122", "12.10", "\u0661\u0662\u0661"])
def test_a_gpu_that_there_is_not_is_refused(asked: str) -> None:
    with pytest.raises(InputError, match="--sm: saw "):
        known_sm(asked)


def test_what_is_told_without_and_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = scan([], len)
    libraries = {name: read_library(io.BytesIO(GPU), name) for name in ("one.so", "two.so")}
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
    last = pair(project, "scripted-tiny", stage="mtp")[-1]
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


def test_a_shell_of_this_machine_has_all_that_it_needs(tmp_path: Path) -> None:
    """Real programs and libraries, taken from here with what ldd names."""
    (tmp_path / "root").mkdir()
    subprocess.run(["tar", "-xf", make_rootfs(tmp_path / "rootfs.tar"), "-C", tmp_path / "root"], check=True)
    machine = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[os.uname().machine]
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    result = examined(paths, None, str(tmp_path / "root"), sm=None, platform="", say=len)
    assert (result.platform, [one.text for one in result.errors if one.rule != "packages"]) == (machine, [])
    library = next((tmp_path / "root").rglob("libc.so.6"))
    library.unlink()
    worse = examined(paths, None, str(tmp_path / "root"), sm=None, platform="", say=len)
    assert [finding.what for finding in worse.errors if finding.rule == "needed"] == ["libc.so.6"]

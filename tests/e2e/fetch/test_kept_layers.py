"""A lock that keeps the layers of the former one: by a real index, and its tree by the real installer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import stack_samples
import uv
from kept_layer_samples import LAYERS, a_stack, stack_lock, versions_of
from newer_engine import newer_root as newer_root
from places import PROJECT
from stack_samples import locked, versions, write
from wheelhouse import Index, make_wheel

from sparkpin.build import context_files, render
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_stack as lock
from sparkpin.fetch.lock_stack import lock_stack
from sparkpin.fetch.stack import fetch_stack
from sparkpin.fetch.uv_resolver import Newer
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.listing import Contents, PathEntry, contents_of, image_contents
from sparkpin.pins import wheel_layers
from sparkpin.pins.manifests import former_stack_lock, load_chain, load_stack, load_stack_lock, lock_text
from sparkpin.pins.schema import LockedFile, StackLock


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    return stack_samples.project(tmp_path, monkeypatch)


def test_lock_keeps_layers_when_asked(paths: Paths, index: Index) -> None:
    w = {}
    for name, requires in (("app", ["dep"]), ("dep", []), ("other", [])):
        w[name] = make_wheel(index.folder, name, requires=requires, size=2_000_000)
    said: list[str] = []
    write(paths, ["app==1.0", "other==1.0"], layers=[{"name": "low", "packages": ["dep"]}, LAYERS[1]])
    first = lock_stack(paths, "s", said.append)
    assert not any("anew" in line for line in said), "there was no lock before"
    w["dep2"] = make_wheel(index.folder, "dep", "2.0", size=1_000_000)
    write(paths, ["app==1.0", "other==1.0", "dep==2.0"], layers=[{"name": "low", "packages": ["dep"]}, LAYERS[1]])
    lock_stack(paths, "s", said.append)
    assert "about 5 MB (layers low, rest); with --keep-layers at most 1 MB" in said[-1]
    (paths.project / "pins/stacks/s.lock").write_text(lock_text(first))
    lock_stack(paths, "s", said.append, newer=Newer())
    assert said[-1].endswith(" 5 MB (layers low, rest)"), "`invoke bump` has no --keep-layers"
    (paths.project / "pins/stacks/s.lock").write_text(lock_text(first))
    second = lock_stack(paths, "s", said.append, keep_layers=True)
    assert second.updates == ["dep"] and second.underlay == [w["dep"]]
    assert said[-1] == "  to be stored anew by the engine: about 1 MB (layers updates)"
    stack = load_stack(paths.project, "s")
    assert load_stack_lock(paths.project, stack) == second == former_stack_lock(paths.project, "s")
    whole = second.model_copy(update={"debs": locked(paths).debs})
    report = fetch_stack(paths, stack, whole, print, str)
    assert report.files == 6 and report.bytes_fetched == sum(file.size for file in (*second.wheels, w["dep"]))


def test_what_need_not_change_stays(paths: Paths, index: Index) -> None:
    """Without --keep-layers, all that is not pinned comes in its newest version."""
    make_wheel(index.folder, "app", requires=["dep", "helper"])
    make_wheel(index.folder, "app", "2.0", requires=["dep", "helper"])
    make_wheel(index.folder, "app", "3.0", requires=["dep", "helper>=2"])
    for name in ("dep", "helper"):
        make_wheel(index.folder, name)
    write(paths, ["app==1.0"])
    first, said = lock_stack(paths, "s", print), list[str]()
    for name in ("dep", "helper"):
        make_wheel(index.folder, name, "2.0")
    write(paths, ["app==2.0"])
    assert lock_stack(paths, "s", said.append, keep_layers=True).updates == ["app"]
    write(paths, ["app==3.0"])
    third = lock_stack(paths, "s", said.append, keep_layers=True)
    assert third.updates == ["app", "dep", "helper"] and third.underlay == first.wheels
    assert any("do not fit the requirements" in line for line in said)
    write(paths, ["app==1.0"])
    assert lock_stack(paths, "s", said.append).updates == []
    assert versions(former_stack_lock(paths.project, "s")) == {"app": "1.0", "dep": "2.0", "helper": "2.0"}


def test_nothing_to_keep_is_told(paths: Paths, index: Index) -> None:
    make_wheel(index.folder, "app")
    write(paths, ["app==1.0"])
    with pytest.raises(ManifestError, match=r"s\.lock: saw 'no such file'"):
        lock_stack(paths, "s", print, keep_layers=True)


@pytest.mark.parametrize("same_names", [True, False])
def test_the_root_file_system_is_a_layer_too(
    paths: Paths, index: Index, monkeypatch: pytest.MonkeyPatch, same_names: bool
) -> None:
    make_wheel(index.folder, "app", requires=["dep"])
    make_wheel(index.folder, "dep")
    write(paths, ["app==1.0"])
    first, said = lock_stack(paths, "s", print), list[str]()
    make_wheel(index.folder, "dep", "2.0")
    write(paths, ["app==1.0", "dep==2.0"])
    newer = [first.debs[0].model_copy(update={"version": "2.36-99"}), *first.debs[1:]]
    if not same_names:
        newer.append(first.debs[0].model_copy(update={"name": "new"}))

    class Apt:
        def closure(self, _: object) -> list[LockedFile]:
            return newer

    monkeypatch.setattr(lock, "open_apt", lambda root, stack: Apt())
    second = lock_stack(paths, "s", said.append, keep_layers=True)
    if same_names:
        assert second.debs == first.debs and second.updates == ["dep"]
        assert any("Debian has other versions today: libc6 " in line for line in said)
    else:
        assert second.debs == newer and second.updates == second.underlay == []
        assert any("the root file system changes" in line for line in said)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of the build steps, for a venv in a temporary folder."""
    spec = importlib.util.spec_from_file_location("install", PROJECT / "dockerfiles/install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "install", module)  # its worker processes look it up
    spec.loader.exec_module(module)
    venv = tmp_path / "opt/vllm"
    options = ("--offline", "--no-config", "--no-cache", "--quiet")
    subprocess.run([uv.find_uv_bin(), "venv", *options, "--python", sys.executable, venv], check=True)
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "UV", [uv.find_uv_bin(), *options])
    return module


def put(context: Path, files: Sequence[context_files.ContextFile], house: Path) -> None:
    for file in files:
        target = context / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((house / file.locked.file).read_bytes() if file.locked else file.text.encode())


def tree_contents(tree: Path, venv: Path) -> Contents:
    tar = tree.with_suffix(".tar")
    with tarfile.open(tar, "w") as opened:
        opened.add(Path(f"{tree}{venv}"), "opt/vllm")
    with tar.open("rb") as file:
        return contents_of(read_layer(file))


def test_a_file_of_two_wheels_ends_the_build(tmp_path: Path, install: ModuleType) -> None:
    """uv installs them side by side: the one that comes last wins, by chance."""
    site = tmp_path / "lib/python3.11/site-packages"
    for name, rows in (("one-1.dist-info", "both.py,,\n"), ("two-1.dist-info", "../site-packages/both.py,,\n")):
        (site / name).mkdir(parents=True)
        (site / name / "RECORD").write_text(f"{rows}{name}/RECORD,,\n")
    with pytest.raises(SystemExit, match=r"both\.py belongs to both one-1\.dist-info and two-1\.dist-info"):
        install.owners(tmp_path)


@pytest.mark.parametrize("case", ["updates-and-removals", "only-removals", "only-additions"])
def test_layers_show_what_a_flat_install_shows(tmp_path: Path, install: ModuleType, case: str) -> None:
    """The real installer; the layers laid over each other as an engine would."""
    (house := tmp_path / "house").mkdir()
    w = versions_of(house)
    first, second = {
        "updates-and-removals": (["app", "dep", "gone", "other"], ["app2", "dep2", "other"]),
        "only-removals": (["app", "dep", "gone", "other"], ["app", "other"]),
        "only-additions": (["other"], ["dep2", "gone", "other"]),  # dep 1.0 has files of other's: refused in one layer
    }[case]
    stack = a_stack("s", [{"name": "low", "packages": [n for n in ("dep", "gone") if n in first]}, LAYERS[1]])
    flat = stack_lock(*(w[name] for name in second))
    kept = wheel_layers.keep_layers(stack_lock(*(w[name] for name in first)), flat)

    def layers(lock: StackLock, name: str, names: object = None) -> list[Contents]:
        own = stack if names is None else a_stack("s", names)
        (image,) = render.render_chain(PROJECT, own, lock, load_chain(PROJECT, "base"))
        context, found = tmp_path / name, []
        put(context, [file for file in image.context if file.path.startswith("wheels/") and not file.mod], house)
        for layer, _ in image.layers:
            if (wheels := context / "wheels" / layer).is_dir():
                tree = tmp_path / f"{name}-{layer}"
                install.main([str(wheels), str(tree), f"{os.uname().machine}-manylinux_2_40"])
                found.append(tree_contents(tree, install.VENV))
        return found

    below = layers(kept, "kept")
    seen = image_contents(below)
    wanted = image_contents(layers(flat, "flat", [LAYERS[1]]))

    def shown(image: Mapping[str, tuple[int, PathEntry]]) -> dict[str, PathEntry]:
        """A file of two wheels belongs to either. Empty folders matter only where Python would import them."""
        rows = {path: replace(entry, owner="") for path, (_, entry) in image.items()}
        return {path: entry for path, entry in rows.items() if entry.kind != "dir" or "site-packages" in path}

    assert shown(seen) == shown(wanted)
    marks = {entry.path for entry in below[-1] if entry.kind == "whiteout"}
    site = next(path for path in seen if path.endswith("site-packages"))
    if case == "updates-and-removals":
        gone = ["dep/old.py", "dep/part", "shared/dep", "dep-1.0.dist-info", "app-1.0.dist-info", "gone", "gone.pth"]
        gone += ["gone-1.0.dist-info", "dep/__pycache__/old.cpython-311.pyc"]
        tag = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
        named = {f"{site}/{path.replace('cpython-311', tag)}" for path in gone}
        assert marks == named | {"opt/vllm/bin/dep-old", "opt/vllm/share/gone.txt"}
    assert bool(marks) == (case != "only-additions")

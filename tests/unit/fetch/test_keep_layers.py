"""A lock that keeps the layers of the former one: what it says, the tree that hides and replaces, the image of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import uv
import yaml
from in_container import output_of
from newer_engine import NEWER, newer_engine
from newer_engine import newer_root as newer_root
from places import PROJECT
from private_engine import remove_tags
from test_lock import paths as paths  # a project whose Debian half of the lock is made up
from test_lock import versions, write
from wheelhouse import Index, make_wheel

from sparkpin.build import context_files, render
from sparkpin.build.image import BuiltImage, Maker, build_image
from sparkpin.build.record import layer_file
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_stack as lock
from sparkpin.fetch import stack as fetch
from sparkpin.fetch import wheels
from sparkpin.fetch.lock_stack import lock_stack
from sparkpin.fetch.stack import fetch_stack
from sparkpin.fetch.store import Store
from sparkpin.host.disk_usage import inventory
from sparkpin.host.engine import Engine
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.listing import Contents, PathEntry, contents_of, image_contents, read_contents
from sparkpin.pins import manifests, wheel_layers
from sparkpin.pins.manifests import former_stack_lock, load_chain, load_stack, load_stack_lock, lock_text
from sparkpin.pins.schema import LockedFile, Stack, StackLock

LAYERS = [{"name": "low", "packages": ["dep", "gone"]}, {"name": "rest", "packages": ["*"]}]
SITE = "opt/vllm/lib/python3.11/site-packages"

# Two versions of one distribution: modules that stay, change, come and go; a file and a folder that change places;
# scripts; and folders that it shares with another distribution, or has alone.
DEP = {
    "dep/__init__.py": "VERSION = 1\n",
    "dep/same.py": "",
    "dep/old.py": "",
    "dep/part/__init__.py": "",
    "dep/part/deep.py": "",
    "dep/turns": "a file",
    "dep/moves/in.txt": "a folder",
    "shared/dep/mine.py": "",
    "shared/both.py": "",
    "dep-1.0.dist-info/entry_points.txt": "[console_scripts]\ndep-old = dep:main\ndep = dep:main\nboth = shared:main\n",
}
DEP_2 = {
    "dep/__init__.py": "VERSION = 2\n",
    "dep/same.py": "",
    "dep/new.py": "",
    "dep/turns/in.txt": "a folder",
    "dep/moves": "a file",
    "dep-2.0.dist-info/entry_points.txt": "[console_scripts]\ndep = dep:main\n",
}
OTHER = {
    "other.py": "",
    "shared/other/yours.py": "",
    "shared/both.py": "",
    "other-1.0.data/scripts/tool": "#!python\n",
    "other-1.0.dist-info/entry_points.txt": "[console_scripts]\nboth = shared:main\n",
}
GONE = {"gone/__init__.py": "", "gone/deep/x.py": "", "gone.pth": "\n", "gone-1.0.data/data/share/gone.txt": "x"}


def wheelhouse(folder: Path) -> dict[str, LockedFile]:
    return {
        "app": make_wheel(folder, "app", requires=["dep", "other", "gone"], files={"app.py": ""}),
        "app2": make_wheel(folder, "app", "2.0", requires=["dep==2.0", "other"], files={"app.py": "NEW = 1\n"}),
        "dep": make_wheel(folder, "dep", files=DEP),
        "dep2": make_wheel(folder, "dep", "2.0", files=DEP_2),
        "other": make_wheel(folder, "other", files=OTHER),
        "gone": make_wheel(folder, "gone", files=GONE),
    }


def stack_lock(*wheels: LockedFile, underlay: Sequence[LockedFile] = (), updates: Sequence[str] = ()) -> StackLock:
    return StackLock(
        stack="s", inputs="0" * 64, debs=[], wheels=list(wheels), underlay=list(underlay), updates=list(updates)
    )


def test_what_changed_goes_on_top_and_what_returns_leaves_it(tmp_path: Path) -> None:
    w = wheelhouse(tmp_path)
    first = stack_lock(w["app"], w["dep"], w["gone"], w["other"])
    second = wheel_layers.keep_layers(first, stack_lock(w["app2"], w["dep2"], w["other"]))
    assert second.updates == ["app", "dep"] and second.underlay == [w["app"], w["dep"], w["gone"]]
    assert second.wheels == [w["app2"], w["dep2"], w["other"]]
    third = wheel_layers.keep_layers(second, stack_lock(w["app2"], w["dep"], w["other"]))
    assert third.updates == ["app"] and third.underlay == [w["app"], w["gone"]], "dep is back at what lies below"
    again = wheel_layers.keep_layers(third, stack_lock(*first.wheels))
    assert again == first and lock_text(again) == lock_text(first)
    added = make_wheel(tmp_path, "added")
    plus = wheel_layers.keep_layers(first, stack_lock(added, *first.wheels))
    assert plus.updates == ["added"] and plus.underlay == []
    for one in (first, second, third, plus):
        assert StackLock.model_validate_json(lock_text(one)) == one
    assert "underlay" not in lock_text(first) and "updates" not in lock_text(first)


def test_locks_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    w = wheelhouse(tmp_path)
    with pytest.raises(ValueError, match="`updates` names misspelt, which `wheels` does not have"):
        stack_lock(w["app"], updates=["misspelt"])
    with pytest.raises(ValueError, match="dep of `underlay` stands in `wheels`, but not in `updates`"):
        stack_lock(w["dep2"], underlay=[w["dep"]])


def test_lower_layers_are_rendered_as_before(tmp_path: Path) -> None:
    w = wheelhouse(tmp_path)
    stack = a_stack("s")
    chain = load_chain(PROJECT, "base")
    first = stack_lock(w["app"], w["dep"], w["gone"], w["other"])
    second = wheel_layers.keep_layers(first, stack_lock(w["app2"], w["dep2"], w["other"]))
    (before,) = render.render_chain(PROJECT, stack, first, chain)
    (after,) = render.render_chain(PROJECT, stack, second, chain)
    assert [name for name, _ in after.layers] == ["venv", "low", "rest", "updates", "stack-mods"]
    assert after.layers[:3] == before.layers[:3], "no layer that stays is made again"
    assert after.key != before.key
    texts = {file.path: file.text for file in after.context if file.source == "text"}
    assert texts["wheels/updates/hidden.txt"] == "".join(
        f"{name}==1.0 --hash=sha256:{w[name].sha256}\n" for name in ("app", "dep", "gone")
    )
    assert texts["wheels/updates/kept.txt"] == f"{w['other'].sha256}  rest/other-1.0-py3-none-any.whl\n"
    whats = [file.what for file in after.context]
    assert "wheel dep 2.0" in whats and "wheel dep 1.0 (hidden)" in whats and "wheel dep 1.0" not in whats
    third = wheel_layers.keep_layers(second, stack_lock(w["app2"], w["dep2"], w["other"], w["gone"]))
    (other,) = render.render_chain(PROJECT, stack, third, chain)
    assert other.layers[3] != after.layers[3], "the same wheels above, another one hidden"


@pytest.mark.parametrize("name", ["venv", "updates", "stack-mods"])
def test_names_of_other_layers_are_refused(tmp_path: Path, name: str) -> None:
    stack = a_stack("s", [{"name": name, "packages": ["*"]}])
    with pytest.raises(ManifestError, match=r"python\.layers"):
        render.render_chain(PROJECT, stack, stack_lock(make_wheel(tmp_path, "a")), load_chain(PROJECT, "base"))


def a_stack(name: str, layers: object = LAYERS) -> Stack:
    value = yaml.safe_load((PROJECT / "pins/stacks/cpu.yaml").read_text())
    value["python"] |= {"layers": layers, "requirements": ["app==1.0"], "exclude": {}}
    return manifests.parse(Stack, {**value, "name": name, "mods": ["modkit"]}, f"{name}.yaml")


# The lock


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
    second = lock_stack(paths, "s", said.append, keep_layers=True)
    assert second.updates == ["dep"] and second.underlay == [w["dep"]]
    assert said[-1] == "  to be stored anew by the engine: about 1 MB (layers updates)"
    stack = load_stack(paths.project, "s")
    assert load_stack_lock(paths.project, stack) == second == former_stack_lock(paths.project, "s")
    report = fetch_stack(paths, stack, second.model_copy(update={"debs": []}), print)
    assert report.files == 4 and report.bytes_fetched == 0


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


def test_both_versions_are_fetched(paths: Paths, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    w = wheelhouse(index.folder)
    write(paths, ["app==2.0"])
    # The Debian half is made up: only its versions count here.
    target = wheels.WheelTarget("3.11.2", "x86_64", 36)
    monkeypatch.setattr(fetch, "target_of", lambda stack, debs: target)
    first = stack_lock(w["app"], w["dep"], w["gone"], w["other"])
    both = wheel_layers.keep_layers(first, stack_lock(w["app2"], w["dep2"], w["other"]))
    report = fetch_stack(paths, load_stack(paths.project, "s"), both, print)
    assert report.files == 6 and all(Store(paths.store).verified(file) for file in both.files)


# The tree


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
    w = wheelhouse(house)
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


# The image


class Bench:
    """A made-up stack on the cpu stack's real root file system."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        real = Paths.from_env()
        self.engine = engine
        self.paths = Paths(PROJECT, folder / "cache", folder / "home")
        (folder / "cache").mkdir()
        (folder / "cache/rootfs").symlink_to(real.cache / "rootfs")
        self.name = f"test{uuid.uuid4().hex[:8]}"
        self.stack = a_stack(self.name)
        self.debs = load_stack_lock(PROJECT, load_stack(PROJECT, "cpu")).debs
        for deb in self.debs:
            Store(real.store).link(deb, Store(self.paths.store).path(deb.sha256))
        (folder / "house").mkdir()
        self.wheels = wheelhouse(folder / "house")
        for wheel in self.wheels.values():
            Store(self.paths.store).add(folder / "house" / wheel.file, wheel)
        self.said: list[str] = []

    def lock(self, *names: str) -> StackLock:
        inputs = manifests.stack_inputs(self.stack)
        wheels = [self.wheels[name] for name in names]
        return StackLock(stack=self.name, inputs=inputs, debs=self.debs, wheels=wheels)

    def build(self, lock: StackLock, stack: Stack | None = None, *, fresh: bool = False) -> BuiltImage:
        (image,) = render.render_chain(PROJECT, stack or self.stack, lock, load_chain(PROJECT, "base"))
        return build_image(self.paths, self.engine, image, self.said.append, fresh=fresh)

    def contents(self, image: BuiltImage) -> dict[str, PathEntry]:
        listed = [read_contents(layer_file(self.paths, diff_id)) for diff_id in image.diff_ids]
        return {
            path: replace(entry, owner="") for path, (_, entry) in image_contents(listed).items() if entry.kind != "dir"
        }

    def run(self, image: BuiltImage, program: str) -> object:
        return json.loads(output_of(self.engine, image.ref, ["python", "-c", program]))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, Engine.connect())
    yield bench
    remove_tags(bench.engine, f"stack-{bench.name}")


PROGRAM = """
import importlib.metadata, importlib.util, json, os
print(json.dumps([
    [__import__("dep").VERSION, importlib.metadata.version("dep"), importlib.metadata.version("app")],
    sorted(d.name for d in importlib.metadata.distributions()),
    [name for name in ("dep.old", "dep.part", "dep.new", "gone", "shared.dep", "shared.both", "shared.other.yours")
     if importlib.util.find_spec(name)],
    sorted(os.listdir("/opt/vllm/bin")),
]))
"""


@pytest.mark.e2e
def test_an_image_costs_what_changed_and_shows_nothing_else(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench.lock("app", "dep", "gone", "other")
    flat = bench.lock("app2", "dep2", "other")
    old = bench.build(first)
    bench.said.clear()
    new = bench.build(wheel_layers.keep_layers(first, flat))
    below = len(old.diff_ids) - 1  # the layer of the stack's mods lies on top
    assert new.diff_ids[:below] == old.diff_ids[:below] and len(new.diff_ids) == len(old.diff_ids) + 1
    assert not any("[low" in line or "[rest" in line for line in bench.said), "what stays is not built again"
    versions, names, found, scripts = bench.run(new, PROGRAM)  # type: ignore[misc]
    assert versions == [2, "2.0", "2.0"]
    assert names == ["app", "dep", "other", "sparkpin-modkit"]
    assert found == ["dep.new", "shared.both", "shared.other.yours"]
    assert {"dep", "both", "tool"} <= set(scripts) and "dep-old" not in scripts
    one_layer = bench.stack.model_copy(
        update={"python": bench.stack.python.model_copy(update={"layers": a_stack("s", LAYERS[1:]).python.layers})}
    )
    plain = bench.build(flat, one_layer)
    assert bench.contents(new) == bench.contents(plain)
    own = {image.config_digest: image for image in inventory(bench.engine)}
    sizes = own[new.config_digest].layers
    assert sizes is not None and sum(list(sizes.values())[below:-1]) < 20_000, "without the stack's mods, on top"
    monkeypatch.setattr(bench, "paths", Paths(PROJECT, bench.paths.cache, tmp_path / "other"))
    assert bench.build(wheel_layers.keep_layers(first, flat), fresh=True).config_digest == new.config_digest


@pytest.mark.e2e
def test_engines_that_build_whole_images_give_the_same(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a wheel in which no file takes a folder's name: Dockerfiles cannot copy one over the other."""
    kept = wheel_layers.keep_layers(bench.lock("app", "dep", "gone", "other"), bench.lock("app2", "dep", "other"))
    trees = bench.build(kept, fresh=True)
    monkeypatch.setattr(Maker, "run", Maker.whole)
    monkeypatch.setattr(bench, "paths", Paths(PROJECT, bench.paths.cache, tmp_path / "other"))
    whole = bench.build(kept, fresh=True)
    assert not whole.cached and whole.config_digest == trees.config_digest
    assert bench.run(whole, "import json, importlib.util as u; print(json.dumps(u.find_spec('gone') is None))") is True


@pytest.mark.e2e
@pytest.mark.parametrize("name", list(NEWER))
def test_newer_engines_give_the_same(bench: Bench, newer_root: Path, tmp_path: Path, name: str) -> None:
    """Docker's own storage and containerd's both follow the deletion marks."""
    first, flat = bench.lock("app", "dep", "gone", "other"), bench.lock("app2", "dep2", "other")
    kept = wheel_layers.keep_layers(first, flat)
    here = bench.build(kept)
    with newer_engine(newer_root, NEWER[name]) as engine:
        (tmp_path / "there").mkdir()
        there = Bench(tmp_path / "there", engine)
        there.stack, there.name = bench.stack, bench.name
        there.build(first)
        built = there.build(kept)
        assert (built.config_digest, built.diff_ids) == (here.config_digest, here.diff_ids)
        assert there.run(built, PROGRAM) == bench.run(here, PROGRAM)

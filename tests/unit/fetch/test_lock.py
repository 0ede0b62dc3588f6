"""Locking against a real index: the closure for another machine, exclusions, and what a person can get wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from places import PROJECT
from wheelhouse import Index, make_wheel

from sparkpin.core.errors import ManifestError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_stack as lock_module
from sparkpin.fetch.debs import apt_conf, parse_uris
from sparkpin.fetch.lock_stack import keep_debs, lock_stack
from sparkpin.fetch.stack import fetch_stack
from sparkpin.fetch.store import Store
from sparkpin.fetch.wheels import WheelTarget, download, length, target_of
from sparkpin.pins.manifests import load_stack, load_stack_lock, lock_text
from sparkpin.pins.schema import LockedFile, StackLock

SPARK = WheelTarget("3.12.3", "aarch64", 39)


class FakeApt:
    """The Debian half of a lock; the real one needs a mirror."""

    def closure(self, _: object) -> list[LockedFile]:
        rows = (("libc6", "2.36-9+deb12u10"), ("python3.11-minimal", "3.11.2-6+deb12u5"))
        return [LockedFile(name=n, version=v, file=f"{n}_{v}_amd64.deb", size=1, sha256="0" * 64) for n, v in rows]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    monkeypatch.setattr(lock_module, "open_apt", lambda root, stack: FakeApt())
    (tmp_path / "project/pins/stacks").mkdir(parents=True)
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


def write(paths: Paths, requirements: list[str], platform: str = "linux/amd64", **python: object) -> None:
    layers = [{"name": "all", "packages": ["*"]}]
    value = {
        "description": "",
        "platform": platform,
        "default_recipe": "r",
        "debian": {"suite": "bookworm", "packages": ["python3"]},
        "python": {"version": "3.11", "requirements": requirements, "layers": layers, **python},
    }
    (paths.project / "pins/stacks/s.yaml").write_text(yaml.safe_dump(value))


def versions(lock: StackLock) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in lock.wheels}


def test_lock_is_written_and_fetch_accepts_it(paths: Paths, index: Index) -> None:
    app = make_wheel(index.folder, "app", requires=["Some_Dep>=1"])
    make_wheel(index.folder, "some-dep", "1.0")
    dep = make_wheel(index.folder, "some-dep", "1.5")
    write(paths, ["app==1.0"])
    lock = lock_stack(paths, "s", print)
    assert lock.wheels == [app, dep]
    assert load_stack_lock(paths.project, load_stack(paths.project, "s")) == lock
    text = (paths.project / "pins/stacks/s.lock").read_text()
    assert "http" not in text and "127.0.0.1" not in text and str(index.folder) not in text
    assert all(Store(paths.store).verified(wheel) for wheel in lock.wheels)
    assert list(paths.store.rglob(".partial-*")) == []
    asked = len(index.asked)
    assert (
        fetch_stack(paths, load_stack(paths.project, "s"), lock.model_copy(update={"debs": []}), print, str).files == 2
    )
    assert len(index.asked) == asked
    assert lock_text(lock_stack(paths, "s", print)) == text


def test_excluded_goes_with_what_only_it_needs(paths: Paths, index: Index) -> None:
    make_wheel(index.folder, "app", requires=["gpu", "shared", "tool[fast,unknown]"])
    make_wheel(index.folder, "gpu", requires=["gpu-helper", "shared"])
    make_wheel(index.folder, "gpu-helper", requires=["gpu-helper-helper"])
    make_wheel(index.folder, "gpu-helper-helper", requires=["gpu-helper"])
    make_wheel(index.folder, "shared")
    make_wheel(index.folder, "tool", requires=["speed; extra == 'fast'", "never; extra == 'slow'"], extras="fast slow")
    make_wheel(index.folder, "speed")
    write(paths, ["app==1.0"], exclude={"gpu": "no GPU here"})
    assert sorted(versions(lock_stack(paths, "s", print))) == ["app", "shared", "speed", "tool"]
    write(paths, ["app==1.0"])
    everything = {"app", "gpu", "gpu-helper", "gpu-helper-helper", "shared", "speed", "tool"}
    assert set(versions(lock_stack(paths, "s", print))) == everything


def test_markers_and_wheels_are_the_targets(paths: Paths, index: Index) -> None:
    """Whatever runs the tests: the lock is for Debian's Python 3.11 with glibc 2.36 on the stack's platform."""
    markers = {
        "old": "python_version < '3.12'",
        "new": "python_version >= '3.12'",
        "patch": "python_full_version < '3.11.3'",
        "arm": "platform_machine == 'aarch64'",
        "intel": "platform_machine == 'x86_64'",
        "windows": "sys_platform == 'win32'",
    }
    make_wheel(index.folder, "app", requires=["native", *(f"{name}; {marker}" for name, marker in markers.items())])
    for name in markers:
        make_wheel(index.folder, name)
    for tag in ("cp311-cp311-manylinux_2_17_{}", "cp311-cp311-manylinux_2_35_{}", "cp311-cp311-manylinux_2_39_{}"):
        for machine in ("x86_64", "aarch64"):
            make_wheel(index.folder, "native", tag=tag.format(machine))
    make_wheel(index.folder, "native", tag="cp312-cp312-manylinux_2_17_x86_64")
    for platform, machine, other in (("linux/amd64", "x86_64", "intel"), ("linux/arm64", "aarch64", "arm")):
        write(paths, ["app==1.0"], platform)
        lock = lock_stack(paths, "s", print)
        assert set(versions(lock)) == {"app", "native", "old", "patch", other}
        (native,) = [wheel.file for wheel in lock.wheels if wheel.name == "native"]
        assert native == f"native-1.0-cp311-cp311-manylinux_2_35_{machine}.whl"


def test_an_override_takes_the_place_of_what_distributions_say(paths: Paths, index: Index) -> None:
    index.sizes = True
    make_wheel(index.folder, "app", requires=["dep>=3", "bound", 'x86-only; platform_machine == "x86_64"'])
    make_wheel(index.folder, "dep", "2.0")
    make_wheel(index.folder, "bound", "13.0.1", tag="py3-none-manylinux_2_17_aarch64", size=9)
    best = make_wheel(index.folder, "bound", "13.0.1", tag="py3-none-manylinux_2_28_aarch64")
    make_wheel(index.folder, "bound", "13.0.1", tag="py3-none-manylinux_2_40_aarch64")  # for a newer glibc
    make_wheel(index.folder, "bound", "13.5.0", tag="py3-none-manylinux_2_17_aarch64")
    bounds = {"constraints": {"bound==13.0.*": "one release"}, "overrides": {"dep==2.0": "3 is not served"}}
    write(paths, ["app==1.0"], "linux/arm64", **bounds)
    lock = lock_stack(paths, "s", lambda _: None)
    assert versions(lock) == {"app": "1.0", "bound": "13.0.1", "dep": "2.0"}
    assert best in lock.wheels
    assert not any(paths.store.rglob("*.whl")), "locking from the index brings nothing into the store"
    stack, fetched = load_stack(paths.project, "s"), paths.cache / "fetched"
    fetched.mkdir(parents=True)
    download(stack, target_of(stack, lock.debs), lock.wheels, fetched, lambda _: "")
    assert {wheel.file for wheel in lock.wheels} == {path.name for path in fetched.glob("*.whl")}

    write(paths, ["app==1.0"], "linux/arm64", overrides=bounds["overrides"])
    assert versions(lock_stack(paths, "s", lambda _: None))["bound"] == "13.5.0"
    write(paths, ["app==1.0"], "linux/arm64", overrides=bounds["overrides"], exclude={"bound": "not here"})
    assert versions(lock_stack(paths, "s", lambda _: None)) == {"app": "1.0", "dep": "2.0"}
    write(paths, ["app==1.0"], "linux/arm64", overrides=bounds["overrides"], exclude={"bond": "misspelt"})
    with pytest.raises(ManifestError, match=r"python\.exclude: .*bond.* that the requirements would bring in"):
        lock_stack(paths, "s", lambda _: None)
    write(paths, ["app==1.0"], "linux/arm64", constraints={"dep<3": "none"}, overrides={"bound==12.0": "none"})
    with pytest.raises(ManifestError, match=r"python\.requirements: .*uv says"):
        lock_stack(paths, "s", lambda _: None)


def test_the_index_as_it_was_on_a_day(paths: Paths, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.sizes = True
    app = make_wheel(index.folder, "app", requires=["dep"])
    old, new = (make_wheel(index.folder, "dep", version) for version in ("1.0", "1.1"))
    index.uploaded |= {app.file: "2026-05-10T07:38:37Z", old.file: "2026-05-31T23:59:59Z"}
    index.uploaded[new.file] = "2026-06-01T00:00:00Z"
    write(paths, ["app==1.0"], as_of="2026-06-01")
    before = lock_stack(paths, "s", lambda _: None)
    assert versions(before) == {"app": "1.0", "dep": "1.0"}
    assert not any(paths.store.rglob("*.whl"))
    write(paths, ["app==1.0"], as_of="2026-06-02")
    with pytest.raises(ManifestError, match="the pins have changed since"):
        load_stack_lock(paths.project, load_stack(paths.project, "s"))
    assert versions(lock_stack(paths, "s", lambda _: None))["dep"] == "1.1"
    write(paths, ["app==1.0"], as_of="2026-05-01")
    monkeypatch.setenv("COLUMNS", "120")  # uv then breaks a line amid what is looked for
    with pytest.raises(ManifestError, match=r"python\.requirements: .*uv says"):
        lock_stack(paths, "s", lambda _: None)
    write(paths, ["app==1.0"], as_of="yesterday")
    with pytest.raises(ManifestError, match=r"python\.as_of"):
        load_stack(paths.project, "s")


def test_a_constraint_alone_is_pips(paths: Paths, index: Index) -> None:
    make_wheel(index.folder, "app", requires=["bound"])
    make_wheel(index.folder, "bound", "13.0")
    make_wheel(index.folder, "bound", "13.5")
    write(paths, ["app==1.0"], constraints={"bound==13.0.*": "one release"})
    assert versions(lock_stack(paths, "s", lambda _: None)) == {"app": "1.0", "bound": "13.0"}


def test_bounds_are_part_of_what_decides_a_lock(paths: Paths, index: Index) -> None:
    make_wheel(index.folder, "app")
    write(paths, ["app==1.0"])
    lock_stack(paths, "s", lambda _: None)
    write(paths, ["app==1.0"], constraints={"app<2": "a reason"})
    with pytest.raises(ManifestError, match="the pins have changed since"):
        load_stack_lock(paths.project, load_stack(paths.project, "s"))


def test_platforms_are_ranked_newest_first() -> None:
    intel = WheelTarget("3.11.2", "x86_64", 36).platforms()
    assert intel[0] == "manylinux_2_36_x86_64" and intel[-1] == "linux_x86_64"
    assert intel.index("manylinux_2_17_x86_64") + 1 == intel.index("manylinux2014_x86_64")
    assert SPARK.platforms()[-3:] == ["manylinux_2_17_aarch64", "manylinux2014_aarch64", "linux_aarch64"]


@pytest.mark.parametrize(
    ("requirements", "exclude", "key"),
    [
        (["app==1.0", "app==2.0"], {}, "python.requirements"),
        (["app==1.0"], {"app": "why"}, "python.exclude"),
        (["app==1.0"], {"Some_Dep": "why"}, "python.exclude"),
        (["app==1.0"], {"misspelt": "why"}, "python.exclude"),
    ],
    ids=["two-versions", "required-and-excluded", "not-canonical", "not-in-the-closure"],
)
def test_what_cannot_be_meant_is_refused(
    paths: Paths, index: Index, requirements: list[str], exclude: dict[str, str], key: str
) -> None:
    make_wheel(index.folder, "app")
    write(paths, requirements, exclude=exclude)
    with pytest.raises(ManifestError) as caught:
        lock_stack(paths, "s", print)
    assert caught.value.key == key
    assert not (paths.project / "pins/stacks/s.lock").exists()


def test_unknown_requirement_keeps_the_old_lock(paths: Paths, index: Index) -> None:
    make_wheel(index.folder, "app")
    write(paths, ["app==1.0"])
    lock_stack(paths, "s", print)
    before = (paths.project / "pins/stacks/s.lock").read_text()
    write(paths, ["app==9.0"])
    with pytest.raises(NetworkError, match=r"app==9\.0"):
        lock_stack(paths, "s", print)
    assert (paths.project / "pins/stacks/s.lock").read_text() == before


def test_source_distributions_are_not_taken(paths: Paths, index: Index) -> None:
    make_wheel(index.folder, "app", requires=["source-only"])
    write(paths, ["app==1.0"])
    with pytest.raises(NetworkError, match="source-only"):
        lock_stack(paths, "s", print)


def test_apt_output_becomes_lock_entries() -> None:
    text = f"'http://m/b.deb' bsdutils_1%3a2.38.1-5+b1_amd64.deb 94412 SHA256:{'a' * 64}\n"
    assert parse_uris(text) == [
        LockedFile(
            name="bsdutils",
            version="1:2.38.1-5+b1",
            file="bsdutils_1%3a2.38.1-5+b1_amd64.deb",
            size=94412,
            sha256="a" * 64,
        )
    ]
    with pytest.raises(NetworkError, match="without size and SHA-256"):
        parse_uris("'http://m/b.deb' b_1_amd64.deb 94412 MD5Sum:00\n")


def test_host_hooks_stay_out_of_the_private_apt(tmp_path: Path) -> None:
    host = (
        'Acquire::http::Proxy "http://p:3128";\nAPT::Update::Post-Invoke:: "rm -f /var/cache/apt/*";\nDir::Cache "x";\n'
    )
    conf = apt_conf(tmp_path, "arm64", host)
    assert "p:3128" in conf and "Post-Invoke" not in conf and f'Dir::Cache "{tmp_path}/cache"' in conf


def test_the_projects_own_locks_fit_their_pins() -> None:
    project = PROJECT
    for file in sorted((project / "pins/stacks").glob("*.lock")):
        stack = load_stack(project, file.stem)
        lock = load_stack_lock(project, stack)
        assert file.read_text() == lock_text(lock), "written by `invoke lock`, not by hand"
        lock_module.check_unique(lock, str(file))
        assert not {wheel.name for wheel in lock.wheels} & set(stack.python.exclude)
        assert "://" not in file.read_text()
        assert json.loads(file.read_text())["stack"] == stack.name


def deb(name: str, version: str, architecture: str = "amd64") -> LockedFile:
    data = f"{name} {version} {architecture}".encode()
    file = f"{name}_{version}_{architecture}.deb"
    return LockedFile(name=name, version=version, file=file, size=len(data), sha256=hashlib.sha256(data).hexdigest())


FORMER = [deb("libc6", "2.36-9"), deb("tzdata", "2026a-0", "all")]


@pytest.mark.parametrize(
    ("today", "kept", "said"),
    [
        (FORMER, True, []),
        ([deb("libc6", "2.36-9+deb12u1"), FORMER[1]], True, ["kept, though Debian has other versions today: libc6 "]),
        ([*FORMER, deb("zlib1g", "1")], False, ["other Debian packages"]),
        ([deb("libc6", "2.36-9", "arm64"), FORMER[1]], False, ["another platform or Debian suite"]),
        ([deb("libc6", "2.41-12"), FORMER[1]], False, ["another platform or Debian suite"]),
    ],
    ids=["same", "update", "names", "platform", "suite"],
)
def test_packages_of_another_system_are_not_kept(
    tmp_path: Path, today: list[LockedFile], kept: bool, said: list[str]
) -> None:
    store, lines = Store(tmp_path / "store"), list[str]()
    for row in FORMER:
        (tmp_path / "deb").write_bytes(row.file.removesuffix(".deb").replace("_", " ").encode())
        store.add(tmp_path / "deb", row)
    assert keep_debs(FORMER, today, store, lines.append) == (FORMER if kept else today)
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True))


def test_kept_packages_that_may_be_nowhere_any_more_are_told(tmp_path: Path) -> None:
    lines: list[str] = []
    newer = [deb("libc6", "2.36-10"), FORMER[1]]
    assert keep_debs(FORMER, newer, Store(tmp_path / "store"), lines.append) == FORMER
    assert "the store lacks libc6_2.36-9_amd64.deb, and mirrors keep only the newest" in lines[1]
    assert "invoke import" in lines[2]


def test_another_platform_starts_anew(paths: Paths, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index.folder, "app")
    write(paths, ["app==1.0"])
    lock_stack(paths, "s", print)
    debs = [deb("libc6", "2.36-9+deb12u10", "arm64"), deb("python3.11-minimal", "3.11.2-6+deb12u5", "arm64")]

    class Apt:
        def closure(self, _: object) -> list[LockedFile]:
            return debs

    monkeypatch.setattr(lock_module, "open_apt", lambda root, stack: Apt())
    write(paths, ["app==1.0"], platform="linux/arm64")
    lock = lock_stack(paths, "s", print, keep_layers=True)
    assert lock.debs == debs and lock.updates == lock.underlay == []


def test_the_size_of_a_file_is_not_that_of_a_compressed_answer(index: Index) -> None:
    index.compresses = True
    wheel = make_wheel(index.folder, "one", "1.0")
    assert length(index.url.replace("/simple/", f"/files/{wheel.file}")) == wheel.size

"""Pruning: what stays and why, and what goes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from made_releases import keep_bytes as keep
from made_releases import release

from sparkpin.build import make as jobs
from sparkpin.build.record import (
    BuildInput,
    BuildRecord,
    LayerRecord,
    begun_mark,
    imported_mark,
    layer_file,
    write_record,
)
from sparkpin.build.rootfs import RootfsSpec
from sparkpin.cli import build as commands_build
from sparkpin.cli import evidence as commands_evidence
from sparkpin.cli import releases as commands
from sparkpin.core import locks
from sparkpin.core.errors import BusyError, DiskError, IntegrityError
from sparkpin.core.files import atomic_file, lock, write_json
from sparkpin.core.paths import Paths
from sparkpin.distribute import transfer
from sparkpin.host.engine import Engine
from sparkpin.host.images import ImageInfo
from sparkpin.measure.quality import corpus, run
from sparkpin.prune import plan
from sparkpin.prune.images import STALE_AFTER, EngineState, unneeded_tags
from sparkpin.prune.plan import Pruned, PruneOptions, make_plan, remove_path, verdicts
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.protection import Protection, protect
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import served
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.served import Service
from sparkpin.smoke import server
from sparkpin.upgrade import bisect_search as search


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


LATER = STALE_AFTER + 60


# What stays, and why


BACK = {4: "current, passed last, one of the 3 to keep", 2: "one of the 3 to keep, to roll back to"}
HELD = {1: "current", 5: "passed last, to roll back to", 3: "in use by the container tiny", 2: "kept: evidence"}


@pytest.mark.parametrize(
    ("states", "keep", "reasons"),
    [
        ("passed, retired, passed base, current, built, failed", 3, BACK | {3: "one of the 3 to keep"}),
        ("passed, passed refused, current", 2, {3: "current, passed last, one of the 2 to keep", 1: "+"}),
        ("current, failed kept, built used, passed, retired, built", 0, HELD),
        ("failed, built", 1, {2: "one of the 1 to keep"}),
    ],
)
def test_what_stays_and_why(states: str, keep: int, reasons: dict[int, str]) -> None:
    """states: of the releases of day 1, 2, ..., and what else there is about one; reasons: by day, the most worthy
    first: that is what can be gone back to. "+": some."""
    words = [word.partition(" ") for word in states.split(", ")]
    made = [
        release(day, state, stage="base" if more == "base" else "v2") for day, (state, _, more) in enumerate(words, 1)
    ]
    about = {more: one for (_, _, more), one in zip(words, made, strict=True)}
    since = "2026-01-09T00:00:00Z"
    kept = {about["kept"].tag: Protection(since=since, note="evidence")} if "kept" in about else {}
    used = {about["used"].tag: "tiny"} if "used" in about else {}
    before = [one.tag for one in made if one.state == "retired"]
    found = verdicts(made, before, keep, kept, used, lambda one: one == about.get("refused"))
    told = {int(one.release.created[8:10]): ", ".join(one.reasons) for one in found if one.reasons}
    assert list(told) == list(reasons) and all(reason in ("+", told[day]) for day, reason in reasons.items())


def engine_image(ref: str, *diff_ids: str) -> ImageInfo:
    return ImageInfo(ref, ref, (ref,), diff_ids, {}, "2026-01-01T00:00:00Z", 0, "linux", "amd64", {})


def state_of(images: list[ImageInfo]) -> EngineState:
    return EngineState(tuple(images), {}, {})


@pytest.mark.parametrize("age", [60, LATER])
def test_root_file_systems_and_unfinished_images_go_once_nothing_needs_them(age: float) -> None:
    kept = release(2, "passed", diff_ids=(f"sha256:{1:064x}", f"sha256:{2:064x}"))
    images = [
        engine_image(kept.tag, *kept.diff_ids),
        engine_image("sparkpin/rootfs:bookworm-aaaaaaaaaaaa", kept.diff_ids[0]),
        engine_image("sparkpin/rootfs:bookworm-bbbbbbbbbbbb", f"sha256:{3:064x}"),
        engine_image("sparkpin/unsealed:v2-cccccccccccc", kept.diff_ids[0]),
    ]
    then = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    old = tuple(image.tags[0] for image in images[2:])
    keys, state = [tag[-12:] for tag in old], state_of(images)
    gone = unneeded_tags(state, [kept], [], keys, then + age)
    assert gone == (() if age < STALE_AFTER else old)
    assert unneeded_tags(state, [kept], [], keys[:1], then + LATER) == old[:1], "not another home's"
    assert state.without(gone) == [image for image in images if image.tags[0] not in gone]


@pytest.mark.parametrize("others", [False, True])
def test_a_moving_tag_goes_with_the_image_that_it_names(others: bool) -> None:
    """others: another data directory has moved ours to its own image."""
    gone, stays, moving = release(1, "passed"), release(2, "current"), "sparkpin/tiny:v2"
    images = [engine_image(one.tag, *one.diff_ids) for one in (gone, stays)]
    images.append(engine_image("sparkpin/tiny:v2-999999999999", "sha256:9"))
    place = 2 if others else 0
    images[place] = dataclasses.replace(images[place], tags=(*images[place].tags, moving))
    found = unneeded_tags(state_of(images), [stays], [gone], (), 0)
    assert found == (gone.tag, *(() if others else (moving,)))


def write(path: Path, content: int | bytes) -> Path:
    """content: so many bytes, or these."""
    with atomic_file(path) as out:
        out.write(os.urandom(content) if isinstance(content, int) else content)
    return path


# Files that no release needs

OLD_LOCK = "pins/stacks/cpu.lock"
MODEL_LOCK = "pins/models/scripted-tiny.lock"


def diff_id(number: int) -> str:
    return f"sha256:{number:064x}"


@dataclasses.dataclass(frozen=True)
class Home:
    """A home and a cache with the files of two releases, 1 and 2, that share a stage's image below theirs."""

    paths: Paths
    spec: RootfsSpec

    @classmethod
    def make(cls, paths: Paths) -> Home:
        spec = RootfsSpec(suite="x", platform="linux/amd64", debs=[], merged=[], script="", epoch=0)
        home = cls(paths, spec)
        home.record(0xA0, parent=None, layers=[0xA0])
        for number in (1, 2):
            home.record(number, parent=0xA0, layers=[0xA0, number])
        write(paths.cache / f"rootfs/{spec.key}.tar", b"tar")
        write(paths.cache / f"rootfs/{spec.key}.sha256", b"hash")
        return home

    def context(self, number: int) -> str:
        return keep(self.paths, b"tool of %d" % number)

    def wheel(self, number: int) -> Path:
        data = b"wheel of %d" % number
        sha256 = hashlib.sha256(data).hexdigest()
        return write(self.paths.store / sha256[:2] / sha256, data)

    def record(self, number: int, *, parent: int | None, layers: list[int]) -> None:
        """A build record, with what it refers to."""
        rows = {"tools/uv": self.context(number), "wheels/a.whl": self.wheel(number).name}
        write_record(
            self.paths,
            BuildRecord(
                stack="cpu",
                stage="v2",
                key=f"{number:02x}" * 32,
                parent_key=f"{parent:02x}" * 32 if parent else None,
                ref=f"sparkpin/stack-cpu:v2-{f'{number:02x}' * 6}",
                parent_ref="sparkpin/whatever:1",
                platform="linux/amd64",
                rootfs=None if parent else self.spec,
                dockerfile="",
                context=[BuildInput(path=path, sha256=sha256, size=1, what=path) for path, sha256 in rows.items()],
                layers=[LayerRecord(name="own", key=f"{number:02x}" * 32, diff_id=diff_id(number))],
                config="{}",
                config_digest=diff_id(number),
                diff_ids=[diff_id(layer) for layer in layers],
                size=1,
                seconds=1.0,
            ),
        )
        for layer in layers:
            write(layer_file(self.paths, diff_id(layer)), b"contents")
        write_json(self.paths.cache / f"layers/{f'{number:02x}' * 32}.json", {"diff_id": diff_id(number)})
        write(self.paths.cache / f"layers/{number:064x}.jsonl.gz", b"contents")

    def release(self, number: int) -> Release:
        inputs = {"recipes/tiny.yaml": keep(self.paths, b"recipe of %d" % number)}
        return release(number, "failed", diff_ids=(diff_id(0xA0), diff_id(number)), inputs=inputs)

    def images(self, *numbers: int) -> list[ImageInfo]:
        """Of the stages that releases 1 and 2 are of; 0xA0: of the one below."""
        return [
            engine_image(f"sparkpin/stack-cpu:v2-{f'{n:02x}' * 6}", *{diff_id(0xA0): 0, diff_id(n): 0}) for n in numbers
        ]

    def going(
        self,
        staying: list[int],
        removed: list[int],
        *,
        later: float = 0,
        images: list[ImageInfo] | None = None,
    ) -> dict[str, set[Path]]:
        """By kind, with the store. images: of the engine, which containers use; None: of what stays."""
        records, known = Releases(self.paths), [self.release(number) for number in (*staying, *removed)]
        shutil.rmtree(records.root, ignore_errors=True)
        for one in known:
            records.save(one)
        for one in known[: len(staying)]:
            protect(records, one)
        used = {image.id: "container" for image in images or ()}
        if images is None:
            images = self.images(*staying, *([0xA0] if staying else []))
        options = PruneOptions(keep=0, now=time.time() + later, store=True)
        done = make_plan(self.paths, EngineState(tuple(images), used, {}), options)
        found = {kind: set(paths) for kind, paths in done.files.items()}
        assert len(found.pop("release records", ())) == len(removed)
        return found


def place_of(paths: Paths, data: bytes) -> Path:
    return KeptInputs.of(paths).store.path(hashlib.sha256(data).hexdigest())


def test_what_only_a_removed_release_refers_to_goes_at_once(paths: Paths) -> None:
    home = Home.make(paths)
    layer_notes = paths.cache / "layers"
    brought = [imported_mark(paths.images / f"cpu-v2-{f'{number:02x}' * 6}.json") for number in (1, 2)]
    for mark in brought:
        mark.touch()
    assert home.going([2], [1]) == {
        "marks of imports": {brought[0]},
        "layer contents": {layer_file(paths, diff_id(1))},
        "layer notes": {layer_notes / f"{'01' * 32}.json", layer_notes / f"{1:064x}.jsonl.gz"},
        "kept inputs": {place_of(paths, b"tool of 1"), place_of(paths, b"recipe of 1")},
        "store": {home.wheel(1)},
        "build records": {paths.images / f"cpu-v2-{'01' * 6}.json"},
    }


def test_nothing_of_a_release_that_stays_goes_however_old_it_is(paths: Paths) -> None:
    home = Home.make(paths)
    everything = {path for root in (paths.home, paths.cache) for path in root.rglob("*") if path.is_file()}
    assert home.going([1, 2], [], later=LATER) == {}
    gone = {path for paths in home.going([], [1, 2], later=LATER).values() for path in paths}
    assert gone == everything | {place_of(paths, b"recipe of 1"), place_of(paths, b"recipe of 2")}


def test_what_no_release_has_named_goes_once_it_is_old(paths: Paths) -> None:
    """It may be the work of a build that runs now: its record comes before the release's."""
    home = Home.make(paths)
    home.record(3, parent=0xA0, layers=[0xA0, 3])
    lonely, fetched = place_of(paths, b"lonely"), home.wheel(9)
    keep(paths, b"lonely")
    rootfs = write(paths.cache / f"rootfs/{'cc' * 32}.tar", b"tar")
    assert home.going([1, 2], []) == {}
    gone = home.going([1, 2], [], later=LATER)
    assert gone["kept inputs"] == {lonely, place_of(paths, b"tool of 3")} and gone["root file systems"] == {rootfs}
    assert gone["build records"] == {paths.images / f"cpu-v2-{'03' * 6}.json"}
    assert gone["store"] == {fetched, home.wheel(3)}


def test_what_was_measured_goes_with_its_release_and_what_nobody_knows_once_it_is_old(paths: Paths) -> None:
    home = Home.make(paths)
    measured = {number: run.folder_of(paths, release(number), corpus.Corpus((), ())) for number in (1, 2, 3)}
    for folder in measured.values():
        write(folder / "measured.npz", b"{}")
        write(folder.with_suffix(".json"), b"[]")
    of_first, of_third = ({folder, folder.with_suffix(".json")} for folder in (measured[1], measured[3]))
    assert home.going([2], [1])["quality measurements"] == of_first
    assert home.going([2], [1], later=LATER)["quality measurements"] == of_first | of_third


def test_searches_of_bisect_stay_with_their_releases(paths: Paths) -> None:
    home, keys = Home.make(paths), [release(number).key[:12] for number in (1, 2, 3)]
    folders = {}
    for good, bad in ((1, 2), (2, 3)):
        folders[good, bad] = paths.home / search.FOLDER / f"{keys[good - 1]}-{keys[bad - 1]}-abcdef012345"
        write(folders[good, bad] / "a.log", b"log")
    assert home.going([1, 2], []) == {}
    assert home.going([1, 2], [], later=LATER)["searches of bisect"] == {folders[2, 3]}
    assert home.going([], [1, 2])["searches of bisect"] == {folders[1, 2]}, "with its releases"


def test_what_an_image_of_the_engine_was_made_from_stays(paths: Paths) -> None:
    """A loaded root file system, a stage's image whose record no release names, a build that was killed."""
    home = Home.make(paths)
    mark = begun_mark(paths.images / f"cpu-v2-{'bb' * 6}.json")
    mark.touch()
    rootfs = write(paths.cache / f"rootfs/{'cc' * 32}.tar", b"tar")
    both, unsealed = home.images(1, 2, 0xA0), engine_image(f"sparkpin/unsealed:v2-{'bb' * 6}", diff_id(1))
    of_root = engine_image(f"sparkpin/rootfs:bookworm-{'cc' * 6}", diff_id(0xA0))
    assert home.going([1], [], later=LATER, images=[*both, unsealed, of_root]) == {}
    gone = home.going([1], [], later=LATER, images=both[:1])
    assert gone["build records"] == {paths.images / f"cpu-v2-{'02' * 6}.json"}
    assert (gone["begun builds"], gone["root file systems"]) == ({mark}, {rootfs})


def test_where_something_cannot_be_read_nothing_is_taken_for_unneeded(paths: Paths, project: Path) -> None:
    """The build record of a release that stays; a lock of the project, by which the store is pruned."""
    home = Home.make(paths)
    record = paths.images / f"cpu-v2-{'02' * 6}.json"
    record.write_text('{"seconds": 1.0}')
    with pytest.raises(IntegrityError, match=str(record)):
        home.going([2], [1], later=LATER)
    assert record in home.going([1], [2])["build records"]
    home = Home.make(dataclasses.replace(paths, project=project))
    (project / MODEL_LOCK).write_text("{")
    with pytest.raises(IntegrityError, match=r"scripted-tiny\.lock"):
        home.going([1, 2], [], later=LATER)


def test_what_serve_starts_again_stays_without_a_container(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker or a person has removed the container; the record names the release, and the one before."""
    known = [release(day, "failed") for day in (1, 2, 3)]
    for one in known:
        Releases(paths).save(one)
    orders = [LaunchOrder(one, paths.home, None, gpus=False, labels={}, timeout=1, restarts=1) for one in known]
    former = Service(orders=(orders[1],))
    served.write(paths.home, "tiny", Service(orders=(orders[0],), former=former))
    images = tuple(engine_image(one.tag, *one.diff_ids) for one in known)
    volumes = {f"cache-{number}": image.config_digest for number, image in enumerate(images, 1)}
    monkeypatch.setattr(plan, "read_engine", lambda *_: EngineState(images, {}, volumes))
    monkeypatch.setattr(commands, "engine_of", lambda _: None)
    monkeypatch.setattr(server, "clear_leftovers", lambda *_, **__: ())
    removed = list[Pruned]()
    monkeypatch.setattr(plan, "remove", lambda engine, done: removed.append(done))
    commands.prune(paths, keep=0)
    assert [one.tag for one in removed[0].removed] == [known[2].tag] and removed[0].volumes == ("cache-3",)


def test_what_a_killed_run_left_goes_once_it_is_old(tmp_path: Path) -> None:
    """Where the home lies in the cache, its files are met twice."""
    paths = Paths(tmp_path / "project", tmp_path / "state", tmp_path / "state/home")
    work = [paths.work / "context-0123456789ab-x", paths.work / "seal-0123456789ab-y"]
    left = {*work, paths.checkpoints / "tiny/.partial-abc"}
    for folder in left:
        folder.mkdir(parents=True)
    if (pid := os.fork()) == 0:  # an `import` that is killed while it keeps an input
        with atomic_file(place_of(paths, b"half")) as file:
            file.write(b"ha")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    left |= set(paths.inputs.glob("??/*"))
    options = PruneOptions(keep=0, now=time.time())
    assert make_plan(paths, state_of([]), options).files == {}
    found = make_plan(paths, state_of([]), dataclasses.replace(options, now=time.time() + LATER)).files
    assert ({kind: set(files) for kind, files in found.items()}, len(found["left by killed runs"])) == (
        {"left by killed runs": left},
        4,
    )


def test_the_store_is_only_pruned_when_told_to(paths: Paths) -> None:
    unneeded = Home.make(paths).wheel(9)
    options = PruneOptions(keep=0, now=time.time() + LATER)
    assert "store" not in make_plan(paths, state_of([]), options).files
    assert unneeded in make_plan(paths, state_of([]), dataclasses.replace(options, store=True)).files["store"]


@pytest.mark.parametrize(("path", "part"), [(OLD_LOCK, "wheels"), (MODEL_LOCK, "headers"), (MODEL_LOCK, "tensors")])
def test_the_store_keeps_what_the_lock_of_a_release_names(paths: Paths, project: Path, path: str, part: str) -> None:
    """Wheels, and of a model's repositories headers and tensors; the lock of the working tree has moved on."""
    paths = dataclasses.replace(paths, project=project)
    home = Home.make(paths)
    lock = (project / path).read_bytes()
    old, new = home.wheel(7), home.wheel(8)
    value = json.loads(lock)
    first = value.get("repositories", {}).get("fp8", value)[part][0]["sha256"].encode()
    locked = dataclasses.replace(home.release(1), inputs={path: keep(paths, lock.replace(first, old.name.encode()))})
    write(project / path, lock.replace(first, new.name.encode()))
    assert home.going([1, 2], [], later=LATER)["store"] == {old}
    Releases(paths).save(locked)
    options = PruneOptions(keep=5, now=time.time() + LATER, store=True)
    done = make_plan(paths, state_of(home.images(1, 2, 0xA0)), options)
    assert old not in done.files.get("store", ())


@pytest.mark.parametrize("path", [OLD_LOCK, MODEL_LOCK])
def test_a_kept_lock_of_another_shape_is_named_where_its_release_stays(paths: Paths, path: str) -> None:
    old = release(1, inputs={path: keep(paths, b"{}")})
    Releases(paths).save(old)
    options = PruneOptions(keep=1, now=time.time(), store=True)
    with pytest.raises(IntegrityError, match=old.tag):
        make_plan(paths, state_of([]), options)
    assert make_plan(paths, state_of([]), dataclasses.replace(options, keep=0)).removed == [old]


@pytest.mark.parametrize("run", ["build", "import", "sign"])
def test_runs_that_keep_files_for_a_release_hold_off_a_prune(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """A part of each is replaced: by then it must hold the locks."""

    class Reached(Exception):
        pass

    def part(*_: object) -> None:
        for path in (paths.home / locks.PRUNE_LOCK, paths.locks / locks.PRUNE_LOCK):
            with pytest.raises(BusyError), lock(path, wait=False):
                pass
            with lock(path, wait=False, shared=True):
                pass
        raise Reached

    made = release(1)
    Releases(paths).save(made)
    monkeypatch.setattr(jobs, "engine_of", part)
    monkeypatch.setattr(transfer, "open_bundle", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(transfer, "require_no_conflict", part)
    monkeypatch.setattr(commands_evidence, "require_consistent", part)
    monkeypatch.setenv("SPARKPIN_CACHE", str(paths.cache))
    monkeypatch.setenv("SPARKPIN_HOME", str(paths.home))
    tasks: dict[str, Callable[[], object]] = {
        "build": lambda: commands_build.carry_out(commands_build.BuildPlan(paths, (), ())),
        "import": lambda: transfer.import_bundle(paths, Engine(None, {}), Path("x")),  # type: ignore[arg-type]
        "sign": lambda: commands_evidence.make_evidence(paths, made.tag),
    }
    with pytest.raises(Reached):
        tasks[run]()


def test_what_cannot_be_removed_is_one_clear_error(small_disk: Path) -> None:
    """A mounted disk can be neither renamed nor removed."""
    with pytest.raises(DiskError) as caught:
        remove_path(small_disk)
    assert caught.value.next_step == f"sudo rm -r {small_disk}"

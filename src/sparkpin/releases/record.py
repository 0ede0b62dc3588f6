"""Release records: one JSON file per release, one pointer file per recipe that says which release is current.

    releases/<recipe>/<stage>-<key12>.json   the record
    releases/<recipe>/<stage>-<key12>/       its evidence (logs, benchmark results)
    releases/<recipe>/current.json           the pointer: the truth about what is current, and was before (`HISTORY`)
    releases/<recipe>/pinned.json            see `keep`

The states "current" and "retired" follow from the pointer, whatever a record says, so a run that was killed between
writing the two leaves nothing wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from sparkpin.core import files
from sparkpin.core.errors import InputError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import INTERNAL, ROOTFS, TAG, UNSEALED, is_internal, name_of, tag_of
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.pins.schema import Name, Sha256, Size, StrictModel
from sparkpin.releases import lookup

SCHEMA: Literal[1] = 1
POINTER = "current.json"
HISTORY = 100  # promotions that a pointer remembers as `before`, the last at the end; `rollback` goes back through them
PRIVATE = 0o600  # of a record: command and environment are nobody else's, and early ones may hold a key
STATEMENT, SIGNATURE, SBOM = "provenance.json", "provenance.json.sig", "sbom.cdx.json"  # in the evidence folder

T = TypeVar("T")
State = Literal["built", "inspected", "passed", "failed", "current", "retired"]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
RECORD = re.compile(r"^[a-z0-9][a-z0-9.-]*-[0-9a-f]{12}\.json$")  # other files of a recipe's folder are no records


def now() -> str:
    """ISO 8601, UTC; sorts as text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(text: str) -> str:
    """The text itself, when it is a moment as `now` writes it. ValueError."""
    datetime.fromisoformat(text)
    return text


def release_key(build_key: str, checkpoint_key: str, argv: Sequence[str], env: dict[str, str]) -> str:
    """SHA-256 (hex) over the image's build key, the checkpoint's key and how they are served."""
    text = json.dumps([build_key, checkpoint_key, list(argv), env], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Demands(StrictModel):
    """What the smoke test of a release asks for. It is in the record, so that an old release is judged as it was.

    checks: names, in the order in which they run; mods: those that must report that they are at work; kernels: those
    whose GPU kernels must come from the image (none in records from before there were any);
    acceptance_floor: least share of drafted tokens; position_floors: of the first, second, ... of each draft;
    draft_lengths: other numbers of drafted tokens to prove; drift: nats by which log-probabilities may differ from
    those of the stage `parent`; scripted: the model's answers are known to the byte; english, follows: `ModelSmoke`.
    """

    checks: Annotated[tuple[str, ...], Field(strict=False)]
    mods: Annotated[tuple[str, ...], Field(strict=False)]
    acceptance_floor: float | None
    scripted: bool
    kernels: Annotated[tuple[str, ...], Field(strict=False)] = ()
    position_floors: Annotated[tuple[float, ...], Field(strict=False)] = ()
    draft_lengths: Annotated[tuple[int, ...], Field(strict=False)] = ()
    parent: str = ""
    drift: float | None = None
    english: float | None = None
    follows: bool = True


@dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid", defer_build=True))
class Release:
    """Everything needed to serve a release without the pins, and what it was made from.

    image: config digest; diff_ids: uncompressed layers from the lowest; size: bytes of all layers; smoke: the result of
    the last smoke test (of `smoke.inspected`, where no server could run: then it has the key "inspected"); inputs:
    project file -> SHA-256 of the manifests, locks, templates and mods at build time (`kept_inputs` keeps their
    bytes); executable: those of them that may be executed; host: the machine that made it, which is in no key, None in
    records from before it was noted.
    """

    schema: Literal[1] = SCHEMA
    tag: str
    recipe: Name
    stage: Name
    stack: Name
    model: Name
    drafter: Name | None = None
    key: Sha256
    build_key: Sha256
    image: Digest
    diff_ids: Annotated[tuple[Digest, ...], Field(strict=False)]
    size: Size
    checkpoint_key: Sha256
    argv: Annotated[tuple[str, ...], Field(strict=False)]
    env: dict[str, str]
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z$"), AfterValidator(moment)]
    build_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    demands: Demands
    state: State = "built"
    smoke: dict[str, Any] | None = None
    inputs: dict[str, Sha256]
    executable: Annotated[tuple[str, ...], Field(strict=False)] = ()
    host: Fingerprint | None = None

    @model_validator(mode="after")
    def check_executable(self) -> Release:
        if strange := sorted({*self.executable} - self.inputs.keys()):
            raise ValueError(f"`executable` of `inputs`, which do not name {strange[0]!r}")
        return self

    @property
    def age(self) -> tuple[str, str]:
        """Sorts releases from the oldest to the newest."""
        return self.created, self.key

    @property
    def name(self) -> str:
        return name_of(self.stage, self.key)

    @property
    def state_text(self) -> str:
        return state_text(self.state)

    @property
    def is_good(self) -> bool:
        """Whether it may be promoted or rolled back to."""
        return self.state in ("passed", "current", "retired")

    @property
    def smoke_passed(self) -> bool:
        return self.smoke is not None and self.smoke.get("passed") is True

    @property
    def smoke_inspected(self) -> bool:
        """Whether its image was examined and nothing was found, but no server has run: neither passed nor failed."""
        return self.smoke is not None and not self.smoke_passed and self.smoke.get("inspected") is True

    @property
    def smoke_failed(self) -> bool:
        return self.smoke is not None and not self.smoke_passed and not self.smoke_inspected

    @property
    def smoke_served(self) -> bool:
        """Whether the result is a server's, and not an inspection's."""
        return self.smoke is not None and "inspected" not in self.smoke

    @property
    def smoke_why(self) -> str:
        """Why no server ran; "" where one did."""
        return str((self.smoke or {}).get("why", ""))

    @property
    def smoke_log(self) -> str:
        """The file of the evidence folder `smoke` that says most of what went wrong."""
        loaded = self.smoke is not None and self.smoke.get("loaded") is True
        return "server.log" if self.smoke_served else "load.log" if loaded else "inspection.json"

    @property
    def smoke_failures(self) -> list[str]:
        """`check: detail` of each check that did not pass; a detail that several share stands once."""
        checks = [check for check in (self.smoke or {}).get("checks", []) if not check["passed"]]
        names: dict[str, list[str]] = {}
        for check in checks:
            names.setdefault(check["detail"], []).append(check["name"])
        return [f"{', '.join(same)}: {detail}" for detail, same in names.items()]

    @property
    def smoke_text(self) -> str:
        if self.smoke is None:
            return ""
        if self.smoke_passed:
            return f"passed in {self.smoke['seconds']:.0f} s" if "seconds" in self.smoke else "passed"
        if self.smoke_inspected:
            return str(self.smoke.get("how", "inspected"))
        failed = [check["name"] for check in self.smoke.get("checks", []) if not check["passed"]]
        more = f", +{len(failed) - 2}" if len(failed) > 2 else ""
        word = "failed" if self.smoke_served else "inspection failed"
        return f"{word}: " + (", ".join(failed[:2]) or "did not start") + more


RELEASE = TypeAdapter(Release)


def state_text(state: str) -> str:
    """As a person reads it; on disk and in JSON it stays what it is."""
    return "previous" if state == "retired" else state


def to_json(release: Release) -> dict[str, Any]:
    value: dict[str, Any] = RELEASE.dump_python(release, mode="json")
    return value


def with_state(release: Release, current: str | None) -> Release:
    """The release in the state that the pointer gives it."""
    if release.tag == current:
        return dataclasses.replace(release, state="current")
    if release.state == "current":
        return dataclasses.replace(release, state=after_current(release))
    return release


def after_current(release: Release) -> State:
    """A release that fails a later smoke test while it is current is nothing to go back to."""
    return "failed" if release.smoke_failed else "inspected" if release.smoke_inspected else "retired"


def after_smoke(release: Release) -> State:
    """What a release that is not current becomes by its smoke test."""
    if not release.smoke_passed:
        return "inspected" if release.smoke_inspected else "failed"
    return "retired" if release.state == "retired" else "passed"


class Releases:
    """The records below `paths.releases`. Readers take no lock: every file is whole or absent."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.root = paths.releases

    def record_path(self, release: Release) -> Path:
        return self.root / release.recipe / f"{release.name}.json"

    @staticmethod
    def evidence_name(release: Release) -> str:
        """The evidence folder of a release, relative to the folder of all releases."""
        return f"{release.recipe}/{release.name}"

    def evidence(self, release: Release) -> Path:
        return self.root / self.evidence_name(release)

    def checkpoint(self, release: Release) -> Path:
        return self.paths.checkpoints / release.model / release.checkpoint_key[:16]

    def pointer_path(self, recipe: str) -> Path:
        return self.root / recipe / POINTER

    @contextlib.contextmanager
    def locked(self, recipe: str) -> Iterator[None]:
        """One writer per recipe. The lock lies with the records, which several caches may share."""
        with files.lock(self.root / recipe / ".lock"):
            with contextlib.suppress(PermissionError):  # somebody else's folder, who lets this user write
                self.root.chmod(0o700)  # evidence repeats the command, and early records have mode 644
            files.sweep(self.root / recipe)  # what lies there directly is written under this lock only
            yield

    def recipes(self) -> list[str]:
        return sorted({path.parent.name for path in self.root.glob("*/*.json")})

    def record_files(self, recipe: str) -> list[Path]:
        return [path for path in (self.root / recipe).glob("*.json") if RECORD.match(path.name)]

    def all(self) -> list[Release]:
        """Every release, by recipe, from the oldest to the newest."""
        return [release for recipe in self.recipes() for release in self.of_recipe(recipe)]

    def of_recipe(self, recipe: str) -> list[Release]:
        """From the oldest to the newest. Raises ManifestError for the first record that is damaged."""
        found, faults = self.readable(recipe)
        if faults:
            raise faults[0]
        return found

    def readable(self, recipe: str) -> tuple[list[Release], list[ManifestError]]:
        """The releases, from the oldest to the newest, and what is wrong with a pointer or records that are damaged."""
        found: list[Release] = []
        faults: list[ManifestError] = []
        current = None
        try:
            current = self.current_tag(recipe)
        except ManifestError as fault:
            faults.append(fault)
        for path in self.record_files(recipe):
            try:
                found.append(with_state(read_record(path), current))
            except ManifestError as fault:
                faults.append(fault)
        return sorted(found, key=lambda release: release.age), faults

    def faults(self) -> list[ManifestError]:
        """What is wrong with damaged records and pointers, of all recipes."""
        return [fault for recipe in self.recipes() for fault in self.readable(recipe)[1]]

    def find(self, tag: str) -> Release | None:
        """The release of a tag, with or without `sparkpin/` in front."""
        parts = TAG.match(tag)
        if not parts:
            return None
        try:
            release = read_record(self.root / parts["recipe"] / f"{parts['name']}.json")
        except FileNotFoundError:
            return None
        return with_state(release, self.current_tag(release.recipe))

    def get(
        self, name: str, recipe: str | None = None, *, has_image: Callable[[Release], bool] | None = None
    ) -> Release:
        """The release of a tag, or of anything else that `lookup` takes for one. recipe: one of this, where it is
        given; has_image: see `lookup.choose`. InputError."""
        release = self.find(name)
        if release is None:
            among = [recipe] if recipe and ":" not in name else self.recipes()
            release = lookup.choose(name, [r for one in among for r in self.readable(one)[0]], has_image)
            if not name.endswith(release.name):
                self.of_recipe(release.recipe)  # raises: the newest that can be read need not be the newest
        if recipe not in (None, release.recipe):
            raise InputError(
                f"{release.tag} is a release of {release.recipe}, not of {recipe}",
                next_step=f"--recipe {release.recipe}",
            )
        return release

    def current_tag(self, recipe: str) -> str | None:
        value = self._pointer(recipe)
        return value["tag"] if value else None

    def _pointer(self, recipe: str) -> dict[str, Any] | None:
        path = self.pointer_path(recipe)
        try:
            value = read_json(path)
        except FileNotFoundError:
            return None
        check_schema(path, value)
        tag, before = value.get("tag"), value.get("before", [])
        if not isinstance(tag, str) or not TAG.match(tag):
            raise ManifestError(path, "tag", tag, "the tag of a release", next_step=ANEW.format(path))
        if not isinstance(before, list) or not all(isinstance(one, str) for one in before):
            raise ManifestError(path, "before", before, "a list of tags", next_step=ANEW.format(path))
        return value

    def before(self, recipe: str) -> list[str]:
        """The tags that were current before the current one, the last promoted at the end; each promotion counts, and
        what was rolled back is undone.
        """
        value = self._pointer(recipe) or {}
        known = value.get("before", [])
        if "back_from" in value:  # it has not ended: what it undoes is there still, to go back to if it fails
            last = max((at for at, tag in enumerate(known) if tag == value["tag"]), default=0)
            return list(known[:last])
        return list(known)

    def unfinished(self, recipe: str) -> tuple[Release, Release] | None:
        """The release that a rollback left, and the one that it went to, where it did not end."""
        try:
            value = self._pointer(recipe) or {}
            pair = [self.find(str(value.get(key))) for key in ("back_from", "tag")]
        except ManifestError:
            return None
        return (pair[0], pair[1]) if pair[0] and pair[1] else None

    def finish(self, recipe: str) -> None:
        """The rollback that moved the pointer has ended."""
        with self.locked(recipe):
            if (value := self._pointer(recipe)) and "back_from" in value:
                value["before"] = self.before(recipe)
                del value["back_from"]
                files.write_json(self.pointer_path(recipe), value)

    def current(self, recipe: str) -> Release | None:
        """What the pointer names; a pointer to a release without a record is an error, not "none"."""
        tag = self.current_tag(recipe)
        if tag is None:
            return None
        release = self.find(tag)
        if release is None:
            raise ManifestError(self.pointer_path(recipe), "tag", tag, "a release that has a record", next_step=AGAIN)
        return release

    def save(self, release: Release) -> None:
        """Write a record, whole or not at all. The image of the current release cannot be changed under it."""
        self.check(release)
        with self.locked(release.recipe):
            if self.current_tag(release.recipe) == release.tag:
                known = self.find(release.tag)
                if known and known.image != release.image:
                    raise IntegrityError(
                        f"{release.tag} is current with image {known.image}; building it again gave {release.image}",
                        next_step=f"invoke rollback --recipe {release.recipe}, then build and smoke it again",
                    )
            self._write(release)

    def update(self, tag: str, change: Callable[[Release | None], Release]) -> Release:
        """Write what `change` makes of the record as it is now: no other writer comes in between."""
        parts = TAG.match(tag)
        if not parts:
            raise InputError(f"{tag!r} is no tag of a release", next_step="invoke images")
        with self.locked(parts["recipe"]):
            known = self.find(tag)
            release = change(known)
            self.check(release)
            if release != known:
                self._write(release)
        return release

    def check(self, release: Release) -> None:
        wanted = tag_of(release.recipe, release.stage, release.key)
        if release.tag != wanted:
            raise ManifestError(self.record_path(release), "tag", release.tag, wanted)
        if is_internal(release.recipe):
            raise InputError(
                f"recipe {release.recipe!r}: {ROOTFS!r}, {UNSEALED!r} and names that start with {INTERNAL!r} belong to "
                "the images of stages",
                next_step="give the recipe another name",
            )

    def smoked(self, tag: str, result: Any, place: Callable[[], object] = lambda: None) -> Release:
        """Keep the result of a smoke test (a dataclass or a mapping with `passed`) and the state that follows.

        place: puts its evidence where it belongs. Called under the recipe's lock, and only for a result that is kept,
        so that record and evidence are of one test.

        The current release stays current; a result of it that fails is told by `smoke` and keeps it from being
        gone back to later. That a server passed stays when its image is merely inspected afterwards.
        """
        with self.locked(self.get(tag).recipe):
            return self.keep_smoke(self.get(tag), result, place)

    def keep_smoke(self, known: Release, result: Any, place: Callable[[], object]) -> Release:
        """As `smoked`, for a caller that holds the recipe's lock since it has read `known`."""
        value = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else dict(result)  # type: ignore[arg-type]
        smoke: dict[str, Any] = json.loads(json.dumps(value, default=str))
        if "inspected" in smoke and known.smoke_passed:
            return known
        place()
        release = dataclasses.replace(known, smoke=smoke)
        if release.state != "current":
            release = dataclasses.replace(release, state=after_smoke(release))
        self._write(release)
        return release

    def point(self, release: Release, *, back_from: str = "") -> None:
        """Make a release the current one. The caller holds the recipe's lock.

        back_from: the release that a rollback leaves, until `finish` says that it has ended. Until then, pointing at
        that release again undoes the rollback.
        """
        old = self._pointer(release.recipe) or {}
        before = self.before(release.recipe)
        if old.get("back_from") == release.tag:
            before = old["before"]
        elif old and not back_from and old["tag"] != release.tag:
            before.append(old["tag"])
        value = {"schema": SCHEMA, "tag": release.tag, "promoted": now(), "before": before[-HISTORY:]}
        value |= {"back_from": back_from} if back_from else {}
        files.write_json(self.pointer_path(release.recipe), value)
        for path in self.record_files(release.recipe):
            try:
                written = read_record(path)
            except ManifestError:  # another record is damaged: it has no state to settle
                continue
            if (settled := with_state(written, release.tag)) != written:
                self._write(settled)

    def _write(self, release: Release) -> None:
        files.write_json(self.record_path(release), to_json(release), mode=PRIVATE)


ANEW = "rm {0}; invoke images lists the releases, and invoke promote TAG makes one of them current"
AGAIN = "invoke images lists the releases; invoke promote TAG writes the pointer anew"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or ManifestError that names the file; FileNotFoundError passes through. InputError for another
    user's file."""
    try:
        return object_of(path, path.read_bytes())
    except PermissionError:
        raise InputError(
            f"{path}: only its owner may read it", next_step="the same command as the user who owns SPARKPIN_HOME"
        ) from None


def object_of(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ManifestError(path, "(whole file)", str(error), "JSON", next_step=REPAIR.format(path)) from None
    if not isinstance(value, dict):
        raise ManifestError(path, "(whole file)", type(value).__name__, "an object", next_step=REPAIR.format(path))
    return value


REPAIR = "restore {0} from a backup, or move it away and build that release again"


def check_schema(path: Path, value: dict[str, Any]) -> None:
    schema = value.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise ManifestError(
            path,
            "schema",
            schema,
            f"{SCHEMA} or less",
            next_step="a newer sparkpin wrote this file: update this checkout",
        )


def read_as(path: Path, adapter: TypeAdapter[T], *, next_step: str) -> T:
    """A file with a schema, or ManifestError for one that is damaged or that a newer sparkpin wrote."""
    text = path.read_bytes()
    check_schema(path, object_of(path, text))
    return parse(path, text, adapter, next_step=next_step)


def parse(path: Path, text: bytes, adapter: TypeAdapter[T], *, next_step: str) -> T:
    """text: of the file `path`. ManifestError where it is not what the adapter wants."""
    try:
        return adapter.validate_json(text)  # a strict dataclass takes its parts as objects of JSON only
    except ValidationError as error:
        raise first_fault(path, error, next_step) from None


def first_fault(path: Path, error: ValidationError, next_step: str) -> ManifestError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "(whole file)"
    seen = "(missing)" if first["type"].startswith("missing") else first["input"]
    return ManifestError(path, key, seen, first["msg"], next_step=next_step)


def read_record(path: Path) -> Release:
    value = read_json(path)
    check_schema(path, value)
    try:
        release = Release(**value)
    except ValidationError as error:
        raise first_fault(path, error, REPAIR.format(path)) from None
    if path.parent.name != release.recipe or path.stem != release.name:
        step = REPAIR.format(path)
        raise ManifestError(path, "key", release.name, f"{path.stem}, as the file is called", next_step=step)
    return release

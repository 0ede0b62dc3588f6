"""Release records: one JSON file for each release, and one list of promotions for each recipe.

    releases/<recipe>/<stage>-<key12>.json   the record
    releases/<recipe>/<stage>-<key12>/       its evidence (logs, benchmark results)
    releases/<recipe>/promotions.json        which release is current, and was before: see `promotions`

A record holds what its smoke test made of it. That it is current, or was, follows from the promotions alone, so no
command has two files to keep in step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from sparkpin.core import files
from sparkpin.core.errors import InputError, IntegrityError, ManifestError
from sparkpin.core.models import Name, Sha256, Size, StrictModel
from sparkpin.core.paths import Paths
from sparkpin.core.tags import INTERNAL, ROOTFS, TAG, UNSEALED, is_internal, name_of, tag_of
from sparkpin.host import machine
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.releases import lookup, promotions
from sparkpin.releases.promotions import Promotion, Promotions

SCHEMA: Literal[1] = 1
PRIVATE = 0o600  # of a record: command and environment are nobody else's
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
    drift: nats by which log-probabilities may differ from those of the stage `parent`; scripted: the model's answers
    are known to the byte; english, follows: `ModelSmoke`.
    """

    checks: Annotated[tuple[str, ...], Field(strict=False)]
    mods: Annotated[tuple[str, ...], Field(strict=False)]
    acceptance_floor: float | None
    scripted: bool
    kernels: Annotated[tuple[str, ...], Field(strict=False)] = ()
    position_floors: Annotated[tuple[float, ...], Field(strict=False)] = ()
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
PROMOTIONS = TypeAdapter(Promotions)
DERIVED: tuple[State, ...] = ("current", "retired")  # states that no record holds


def state_text(state: str) -> str:
    """As a person reads it; on disk and in JSON it stays what it is."""
    return "was current" if state == "retired" else state


def to_json(release: Release) -> dict[str, Any]:
    value: dict[str, Any] = RELEASE.dump_python(release, mode="json")
    return value


def with_state(release: Release, rows: Sequence[Promotion]) -> Release:
    """The release in the state that the promotions give it. One that failed a later smoke test while it was current is
    nothing to go back to."""
    if release.tag == promotions.current_of(rows):
        return dataclasses.replace(release, state="current")
    was_current = release.state == "passed" and any(row.tag == release.tag for row in rows)
    return dataclasses.replace(release, state="retired") if was_current else release


def after_smoke(release: Release) -> State:
    """What the last smoke test makes of a release."""
    if release.smoke is None:
        return "built"
    return "passed" if release.smoke_passed else "inspected" if release.smoke_inspected else "failed"


class Releases:
    """The records below `paths.releases`. Readers take no lock: every file is whole or absent."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.root = paths.releases

    def record_path(self, release: Release) -> Path:
        return self.root / release.recipe / f"{release.name}.json"

    def evidence(self, release: Release) -> Path:
        return self.root / release.recipe / release.name

    def checkpoint(self, release: Release) -> Path:
        return self.paths.checkpoints / release.model / release.checkpoint_key[:16]

    def promotions_path(self, recipe: str) -> Path:
        return self.root / recipe / promotions.FILE

    @contextlib.contextmanager
    def locked(self, recipe: str) -> Iterator[None]:
        """One writer per recipe. The lock lies with the records, which several caches may share."""
        with files.lock(self.root / recipe / ".lock"):
            with contextlib.suppress(PermissionError):  # somebody else's folder, who lets this user write
                self.root.chmod(0o700)  # evidence repeats the command
            files.sweep(self.root / recipe)  # what lies there directly is written under this lock only
            yield

    def recipes(self) -> list[str]:
        return sorted({path.parent.name for path in self.root.glob("*/*.json")})

    def record_files(self, recipe: str) -> list[Path]:
        return [path for path in (self.root / recipe).glob("*.json") if RECORD.match(path.name)]

    def default_recipe(self) -> str:
        """For a command about releases that names none: the one whose release became current last, else the only one
        that has releases, else this machine's."""
        known, promoted = [name for name in self.recipes() if self.record_files(name)], dict[str, str]()
        for name in known:
            with contextlib.suppress(ManifestError):  # a damaged list of another stops nobody
                if rows := self.promotions(name):
                    promoted[name] = rows[-1].time
        if promoted:
            return max(promoted, key=promoted.__getitem__)
        return known[0] if len(known) == 1 else machine.default_recipe(self.paths.project)

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
        """The releases, from the oldest to the newest, and what is wrong with promotions or records that are
        damaged."""
        found: list[Release] = []
        faults: list[ManifestError] = []
        rows: Sequence[Promotion] = ()
        try:
            rows = self.promotions(recipe)
        except ManifestError as fault:
            faults.append(fault)
        for path in self.record_files(recipe):
            try:
                found.append(with_state(read_record(path), rows))
            except ManifestError as fault:
                faults.append(fault)
        return sorted(found, key=lambda release: release.age), faults

    def find(self, tag: str) -> Release | None:
        """The release of a tag, with or without `sparkpin/` in front."""
        parts = TAG.match(tag)
        if not parts:
            return None
        with contextlib.suppress(FileNotFoundError):
            release = read_record(self.root / parts["recipe"] / f"{parts['name']}.json")
            return with_state(release, self.promotions(release.recipe))
        return None

    def get(self, name: str, recipe: str | None = None) -> Release:
        """The release of a tag, or of anything else that `lookup` takes for one. recipe: one of this, where it is
        given, else of the default one where several have the name. InputError."""
        release = self.find(name)
        if release is None:
            among = [recipe] if recipe and ":" not in name else self.recipes()
            known = [release for one in among for release in self.readable(one)[0]]
            release = lookup.choose(name, known, recipe, self.default_recipe)
            if not name.endswith(release.name):
                self.of_recipe(release.recipe)  # raises: the newest that can be read need not be the newest
        if recipe not in (None, release.recipe):
            raise InputError(
                f"{release.tag} is a release of {release.recipe}, not of {recipe}",
                next_step=f"--recipe {release.recipe}",
            )
        return release

    def promotions(self, recipe: str) -> tuple[Promotion, ...]:
        """The first one first; none where no release of the recipe was ever current."""
        path = self.promotions_path(recipe)
        step = f"rm {path}; invoke images lists the releases, and invoke promote TAG makes one of them current"
        found = read_optional(path, PROMOTIONS, next_step=step)
        return found.promotions if found else ()

    def current_tag(self, recipe: str) -> str | None:
        return promotions.current_of(self.promotions(recipe))

    def before(self, recipe: str) -> list[str]:
        """See `promotions.former_of`."""
        return promotions.former_of(self.promotions(recipe))

    def current(self, recipe: str) -> Release | None:
        """What was promoted last; a promotion of a release without a record is an error, not "none"."""
        tag = self.current_tag(recipe)
        release = self.find(tag) if tag else None
        if tag and release is None:
            path, step = self.promotions_path(recipe), "invoke images lists the releases; invoke promote TAG takes one"
            raise ManifestError(path, "promotions", tag, "a release that has a record", next_step=step)
        return release

    def point(self, release: Release, *, rollback: bool = False, accepted: Mapping[str, str] | None = None) -> None:
        """Make a release the current one. The caller holds the recipe's lock.

        rollback: it is gone back to; accepted: as of `Promotion`. What is current already is not promoted once more,
        unless another loss is accepted.
        """
        rows = self.promotions(release.recipe)
        if promotions.current_of(rows) != release.tag or (accepted and rows[-1].accepted != accepted):
            rows = (*rows, Promotion(tag=release.tag, time=now(), rollback=rollback, accepted=dict(accepted or {})))
            value = PROMOTIONS.dump_python(Promotions(promotions=rows), mode="json", by_alias=True)
            files.write_json(self.promotions_path(release.recipe), value)

    def save(self, release: Release) -> None:
        """Write a record, whole or not at all."""
        self.update(release.tag, lambda known: release)

    def update(self, tag: str, change: Callable[[Release | None], Release]) -> Release:
        """Write what `change` makes of the record as it is now: no other writer comes in between. The image of the
        current release cannot be changed under it."""
        parts = TAG.match(tag)
        if not parts:
            raise InputError(f"{tag!r} is no tag of a release", next_step="invoke images")
        with self.locked(parts["recipe"]):
            known = self.find(tag)
            release = change(known)
            self.check(release)
            if known and known.state == "current" and known.image != release.image:
                raise IntegrityError(
                    f"{tag} is current with image {known.image}; building it again gave {release.image}",
                    next_step=f"invoke rollback --recipe {release.recipe}, then build and smoke it again",
                )
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

        The current release stays current. That a server passed stays when its image is merely inspected afterwards.
        """
        value = dataclasses.asdict(result) if dataclasses.is_dataclass(result) else dict(result)  # type: ignore[arg-type]
        smoke: dict[str, Any] = json.loads(json.dumps(value, default=str))
        with self.locked(self.get(tag).recipe):
            known = self.get(tag)
            if "inspected" in smoke and known.smoke_passed:
                return known
            place()
            release = dataclasses.replace(known, smoke=smoke)
            release = dataclasses.replace(release, state=after_smoke(release))
            self._write(release)
            return with_state(release, self.promotions(release.recipe))

    def _write(self, release: Release) -> None:
        if release.state in DERIVED:
            release = dataclasses.replace(release, state=after_smoke(release))
        files.write_json(self.record_path(release), to_json(release), mode=PRIVATE)


def read_as(path: Path, adapter: TypeAdapter[T], *, next_step: str) -> T:
    """A JSON file with a schema. ManifestError for one that is damaged or of another schema, InputError for another
    user's; FileNotFoundError passes through."""
    try:
        text = path.read_bytes()
    except PermissionError:
        raise InputError(
            f"{path}: only its owner may read it", next_step="the same command as the user who owns SPARKPIN_HOME"
        ) from None
    try:
        return adapter.validate_json(text)  # a strict dataclass takes its parts as objects of JSON only
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(whole file)"
        got = "(missing)" if first["type"].startswith("missing") else first["input"]
        raise ManifestError(path, key, got, first["msg"], next_step=next_step) from None


def read_optional(path: Path, adapter: TypeAdapter[T], *, next_step: str) -> T | None:
    """As `read_as`; None where there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return read_as(path, adapter, next_step=next_step)
    return None


def read_record(path: Path) -> Release:
    step = f"restore {path} from a backup, or move it away and build that release again"
    release = read_as(path, RELEASE, next_step=step)
    if path.parent.name != release.recipe or path.stem != release.name:
        raise ManifestError(path, "key", release.name, f"{path.stem}, as the file is called", next_step=step)
    return release

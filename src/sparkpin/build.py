"""Building: a rendered stage becomes a sealed, loaded and tagged image, or is found done."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sparkpin import rootfs, seal
from sparkpin.canonical import read_layer
from sparkpin.context import context_folder
from sparkpin.engine import Engine, ImageInfo
from sparkpin.errors import BuildError, EngineError
from sparkpin.files import disk_errors, lock, write_json
from sparkpin.paths import Paths
from sparkpin.releases import UNSEALED
from sparkpin.render import Rendered
from sparkpin.schema import Stack, StackLock
from sparkpin.seal import Part, Sealed
from sparkpin.store import Store

Say = Callable[[str], None]
PARALLEL_TREES = 3  # one installs while another is copied: the engine waits for its disk half of the time


@dataclass(frozen=True)
class BuiltImage:
    """A sealed image in the engine. seconds: what its build took; cached: it was there already."""

    ref: str
    config_digest: str
    diff_ids: tuple[str, ...]
    size: int
    seconds: float
    cached: bool


def is_built(paths: Paths, engine: Engine, rendered: Rendered) -> bool:
    return find_built(paths, engine, rendered) is not None


def find_built(paths: Paths, engine: Engine, rendered: Rendered) -> BuiltImage | None:
    """The image, if the engine has it with the build key and the very configuration that was recorded."""
    try:
        known = json.loads(record_file(paths, rendered).read_text(encoding="utf-8"))
        seconds, digest = float(known["seconds"]), known["config_digest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    image = engine.image(rendered.ref)
    if image is None or image.labels.get("sparkpin.key") != rendered.key or image.config_digest != digest:
        return None
    return BuiltImage(rendered.ref, digest, image.diff_ids, image.size, seconds, cached=True)


def record_file(paths: Paths, rendered: Rendered) -> Path:
    return paths.home / "images" / f"{rendered.stack}-{rendered.stage}-{rendered.key[:12]}.json"


def build_image(
    paths: Paths,
    engine: Engine,
    stack: Stack,
    stack_lock: StackLock,
    rendered: Rendered,
    say: Say,
    *,
    fresh: bool = False,
) -> BuiltImage:
    """Build, seal, load and tag one stage. Of two runs at once the second waits and finds it done.

    fresh: build even what is there, without the engine's build cache: to check that the bytes come out the same.
    """
    with lock(
        paths.locks / f"image-{rendered.key}.lock",
        on_wait=lambda: say(f"{rendered.stage}: another run is building it; waiting"),
    ):
        if not fresh and (found := find_built(paths, engine, rendered)):
            say(f"{rendered.stage}: {rendered.ref} is there")
            return found
        started = time.monotonic()
        parent = require_parent(paths, engine, stack, stack_lock, rendered, say)
        sealed = build_sealed(paths, engine, stack, rendered, parent, say, fresh)
        image = engine.image(rendered.ref)
        if image is None or (image.config_digest, image.diff_ids) != (sealed.config_digest, sealed.diff_ids):
            engine.untag(rendered.ref)
            raise BuildError(
                f"{rendered.ref}: loaded {sealed.config_digest}, the engine has {image and image.config_digest}",
                next_step="the same command again; if it stays so, report the engine's version",
            )
        built = BuiltImage(
            rendered.ref, sealed.config_digest, sealed.diff_ids, image.size, time.monotonic() - started, cached=False
        )
        write_json(record_file(paths, rendered), {**asdict(built), "key": rendered.key})
        say(f"{rendered.stage}: {rendered.ref} in {built.seconds:.1f} s")
        return built


def require_parent(
    paths: Paths, engine: Engine, stack: Stack, stack_lock: StackLock, rendered: Rendered, say: Say
) -> ImageInfo:
    """The image that the stage stands on; the root file system is made when the engine lacks it."""
    parent = engine.image(rendered.parent_ref)
    if rendered.parent_key is not None:
        if parent is None:
            raise BuildError(f"{rendered.stage}: the engine has no {rendered.parent_ref}", next_step="invoke build")
        return parent
    key = rootfs.rootfs_key(stack, stack_lock)
    if parent is not None and parent.labels.get("sparkpin.rootfs") == key:
        return parent
    tar = rootfs.build_rootfs(paths, stack, stack_lock, say)
    say(f"{rendered.stage}: loading the root file system")
    architecture = stack.platform.partition("/")[2]
    return engine.import_rootfs(tar, rendered.parent_ref, architecture=architecture, labels={"sparkpin.rootfs": key})


def build_sealed(
    paths: Paths, engine: Engine, stack: Stack, rendered: Rendered, parent: ImageInfo, say: Say, fresh: bool
) -> Sealed:
    """The engine's own, dated image lives only within this function, under a tag that nothing else reads."""
    for left in paths.work.glob(f"*-{rendered.key[:12]}-*"):
        shutil.rmtree(left, ignore_errors=True)
    with disk_errors(paths.work):
        paths.work.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=f"seal-{rendered.key[:12]}-", dir=paths.work) as work,
            context_folder(paths.work, Store(paths.store), rendered) as context,
        ):
            maker = Maker(paths, engine, stack.platform, rendered, parent, context, Path(work), say, fresh)
            try:
                return maker.run()
            finally:
                with contextlib.suppress(EngineError):  # it must not hide why the build ended
                    engine.untag(maker.unsealed)


@dataclass(frozen=True)
class Maker:
    """Two ways from a context to the sealed image, which give the same image.

    `from_trees` takes each new layer alone and sends the engine no layer that it has. `whole` builds the last stage,
    lets the engine save all of it and sends all of it: for templates without trees, and for engines that want every
    layer.
    """

    paths: Paths
    engine: Engine
    platform: str
    rendered: Rendered
    parent: ImageInfo
    context: Path
    work: Path
    say: Say
    fresh: bool
    told: set[str] = field(default_factory=set)

    @property
    def unsealed(self) -> str:
        return f"sparkpin/{UNSEALED}:{self.rendered.stage}-{self.rendered.key[:12]}"

    def run(self) -> Sealed:
        if " AS config\n" not in self.rendered.dockerfile or not self.engine.keeps_layers:
            return self.whole()
        for trust in (False,) if self.fresh else (True, False):
            try:
                return self.from_trees(trust)
            except EngineError as error:
                self.tell(f"the engine wants more layers than it was sent: {error.message}")
        return self.whole()

    def tell(self, line: str) -> None:
        """Each line once: the stages' common steps come in every build, from the engine's cache."""
        if line not in self.told:
            self.told.add(line)
            self.say(f"{self.rendered.stage}: {line}")

    def build(self, tag: str | None = None, *, target: str | None = None, output: Path | None = None) -> None:
        self.engine.build(
            self.context,
            tag,
            say=self.tell,
            target=target,
            output=output,
            platform=self.platform,
            no_cache=self.fresh,
        )

    def from_trees(self, trust: bool) -> Sealed:
        """With `trust`, a layer that an earlier run made from the same inputs is taken to be in the engine."""
        self.build(self.unsealed, target="config")
        image = self.image()
        if image.diff_ids != self.parent.diff_ids:
            raise BuildError(
                f"{self.rendered.stage}: the stage `config` of its Dockerfile adds layers",
                next_step="let it set only ENV, USER, CMD, LABEL and the like; layers come from the trees",
            )
        parts = [Part(diff_id) for diff_id in self.parent.diff_ids]
        new = [name for name, _ in self.rendered.layers]
        for _, key in self.rendered.layers if trust else ():
            if not (past := self.known(key)):
                break
            parts.append(Part(past))
            new.pop(0)
        with ThreadPoolExecutor(PARALLEL_TREES) as pool, contextlib.ExitStack() as stack:
            for tar in list(pool.map(self.make_tree, new)):
                parts.append(Part(layer=read_layer(stack.enter_context(tar.open("rb")))))
            self.tell("sealing and loading")
            sealed = self.load(parts, image)
        if len(sealed.diff_ids) == len(parts):
            for (_, key), diff_id in zip(
                self.rendered.layers, sealed.diff_ids[len(self.parent.diff_ids) :], strict=True
            ):
                write_json(self.note(key), {"diff_id": diff_id})
        return sealed

    def make_tree(self, name: str) -> Path:
        tar = self.work / f"{name}.tar"
        self.build(target=f"{name}-tree", output=tar)
        return tar

    def whole(self) -> Sealed:
        self.build(self.unsealed)
        image = self.image()
        self.tell("reading the layers from the engine")
        archive = self.work / "saved.tar"
        with archive.open("wb") as file:
            self.engine.save(self.unsealed, file)
        self.tell("sealing and loading")
        with seal.open_saved(archive) as saved:
            return self.load(seal.parts_of(saved, self.parent.diff_ids, leave_out=False), image)

    def image(self) -> ImageInfo:
        image = self.engine.image(self.unsealed)
        if image is None:
            raise EngineError(f"the engine built {self.unsealed} and does not have it", next_step="invoke build")
        return image

    def load(self, parts: Sequence[Part], image: ImageInfo) -> Sealed:
        ref = self.rendered.ref
        return self.engine.load_sealed(parts, image.config, os=image.os, architecture=image.architecture, tag=ref)

    def known(self, key: str) -> str | None:
        """The sealed diff ID of a layer that an earlier run made from the same inputs."""
        try:
            return str(json.loads(self.note(key).read_text(encoding="utf-8"))["diff_id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note(self, key: str) -> Path:
        return self.paths.cache / "layers" / f"{key}.json"

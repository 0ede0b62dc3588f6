"""Building: a rendered stage becomes a sealed, loaded and tagged image, or is found done."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from sparkpin.build import begun, cross_build, rootfs
from sparkpin.build.closed_dockerfile import BUILDER, require_closed
from sparkpin.build.context import context_folder
from sparkpin.build.record import (
    BuildRecord,
    LayerRecord,
    is_imported,
    layer_file,
    read_record,
    record_file,
    shared_fields,
    write_record,
)
from sparkpin.build.render import RenderedImage
from sparkpin.core.errors import BuildError, DifferenceError, EngineError, IntegrityError
from sparkpin.core.files import disk_errors, lock, sha256_file, write_json
from sparkpin.core.locks import saving_folder
from sparkpin.core.paths import Paths
from sparkpin.core.progress import UNPACKS, progress
from sparkpin.core.tags import rootfs_ref, unsealed_ref
from sparkpin.core.terminal import Say
from sparkpin.host import buildkit
from sparkpin.host.content_store import Sizes
from sparkpin.host.engine import Engine, ImageInfo
from sparkpin.image.layer_tar import CanonicalLayer, read_layer, read_layer_of
from sparkpin.image.listing import Contents, contents_of, read_contents, write_contents
from sparkpin.image.oci import OciImage
from sparkpin.image.saved import open_saved
from sparkpin.image.seal import Part
from sparkpin.pins.schema import BY_DIGEST

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


def is_built(paths: Paths, engine: Engine, rendered: RenderedImage) -> bool:
    return find_built(paths, engine, rendered) is not None


def find_built(paths: Paths, engine: Engine, rendered: RenderedImage, wanted: str | None = None) -> BuiltImage | None:
    """The image, if the engine has it with the build key and the very configuration and layers that were recorded.

    What another machine recorded counts only for who wants that very config digest: its key is just what it says.
    """
    try:
        known = read_record(record_file(paths, rendered))
    except (FileNotFoundError, IntegrityError):
        return None
    if is_imported(paths, rendered) and known.config_digest != wanted:
        return None
    image = engine.image(rendered.ref)
    if image is None or image.labels.get("sparkpin.key") != rendered.key:
        return None
    if (image.config_digest, list(image.diff_ids)) != (known.config_digest, known.diff_ids):
        return None
    if not has_contents(paths, known.diff_ids):
        return None
    return BuiltImage(rendered.ref, known.config_digest, image.diff_ids, image.size, known.seconds, cached=True)


def build_image(
    paths: Paths, engine: Engine, rendered: RenderedImage, say: Say, *, fresh: bool = False, wanted: str | None = None
) -> BuiltImage:
    """Build, seal, load, tag and record one stage. Of two runs at once the second waits and finds it done.

    fresh: build even what is there, without the engine's build cache: to check that the bytes come out the same.
    wanted: the config digest that must come out; another is a DifferenceError, with neither tag nor record.
    """
    with lock(
        paths.locks / f"image-{rendered.key}.lock",
        on_wait=lambda: say(f"{rendered.stage}: another run is building it; waiting"),
    ):
        # Made again from such a record it stays one, and its layers are none that a build may take for its own.
        imported = wanted is not None and is_imported(paths, rendered)
        if not fresh and (found := find_built(paths, engine, rendered, wanted)):
            say(f"{rendered.stage}: {rendered.ref} is there")
            return found
        started = time.monotonic()
        require_closed(rendered.dockerfile, rendered.parent_ref)
        for left in paths.work.glob(f"*-{rendered.key[:12]}-*"):  # by a killed run
            shutil.rmtree(left, ignore_errors=True)
        cross_build.require_own_uv(rendered, engine.platform)
        begun.begun(paths, rendered)
        parent = require_parent(paths, engine, rendered, say)
        builder = require_builder(paths, engine, rendered, say)
        with (
            context_folder(paths, rendered) as (context, files),
            tempfile.TemporaryDirectory(prefix=f"seal-{rendered.key[:12]}-", dir=paths.work) as work,
        ):
            ref = rootfs_ref(builder.suite, builder.key) if builder else None
            made = Maker(
                paths, engine, rendered, parent, ref, context, Path(work), say, fresh, keeps_notes=not imported
            ).made()
        sealed = made.sealed
        image = engine.image(rendered.ref)
        if image is None or (image.config_digest, image.diff_ids) != (sealed.config_digest, sealed.diff_ids):
            engine.untag(rendered.ref)
            raise BuildError(
                f"{rendered.ref}: loaded {sealed.config_digest}, the engine has {image and image.config_digest}",
                next_step="the same command again; if it stays so, report the engine's version",
            )
        if wanted not in (None, sealed.config_digest):
            engine.untag(rendered.ref)
            raise DifferenceError(
                f"{rendered.ref} came out as {sealed.config_digest}, recorded is {wanted}",
                next_step="invoke reproduce (on the machine that has the release) tells what differs",
            )
        seconds = round(time.monotonic() - started, 3)
        write_record(
            paths,
            BuildRecord(
                **shared_fields(rendered),
                builder=builder,
                context=list(files),
                layers=[
                    LayerRecord(name=name, key=key, diff_id=made.layers.get(name)) for name, key in rendered.layers
                ],
                config=sealed.config.decode(),
                config_digest=sealed.config_digest,
                diff_ids=list(sealed.diff_ids),
                size=image.size,
                seconds=seconds,
            ),
            imported=imported,
        )
        begun.recorded(paths, rendered)
        say(f"{rendered.stage}: {rendered.ref} in {seconds:.1f} s")
        return BuiltImage(rendered.ref, sealed.config_digest, sealed.diff_ids, image.size, seconds, cached=False)


def require_parent(paths: Paths, engine: Engine, rendered: RenderedImage, say: Say) -> ImageInfo:
    """The image that the stage stands on; the root file system is made when the engine lacks it."""
    parent, by_digest = engine.image(rendered.parent_ref), BY_DIGEST.fullmatch(rendered.parent_ref)
    if rendered.rootfs is None:
        if parent is None:
            get = f"docker pull --platform {rendered.platform} {rendered.parent_ref}" if by_digest else "invoke build"
            raise BuildError(f"{rendered.stage}: the engine has no {rendered.parent_ref}", next_step=get)
        if by_digest and f"{parent.os}/{parent.architecture}" != rendered.platform:
            raise BuildError(
                f"{rendered.parent_ref} is for {parent.os}/{parent.architecture}, the stack for {rendered.platform}",
                next_step=f"name that platform's own digest as `base.image` of pins/stacks/{rendered.stack}.yaml",
            )
        if not has_contents(paths, parent.diff_ids):
            keep_foreign(paths, engine, parent)
        return parent
    tar, parent = require_rootfs(paths, engine, rendered.rootfs, rendered.parent_ref, say)
    if not has_contents(paths, parent.diff_ids):
        with tar.open("rb") as file:
            keep_contents(paths, parent.diff_ids[0], lambda: contents_of(read_layer(file, everything=True)))
    return parent


def keep_foreign(paths: Paths, engine: Engine, image: ImageInfo) -> None:
    """The listings of the layers of an image that was not made here: from the engine, which gives the image whole."""
    with disk_errors(paths.work), saving_folder(paths) as folder:
        archive = folder / "saved.tar"
        with archive.open("wb") as file:
            engine.save(image.ref, file)
        with open_saved(archive) as saved:
            for diff_id, tar in zip(saved.diff_ids, saved.layers, strict=True):
                layer = read_layer(cast(BinaryIO, tar), everything=True)
                keep_contents(paths, diff_id, functools.partial(contents_of, layer))


def require_rootfs(paths: Paths, engine: Engine, spec: rootfs.RootfsSpec, ref: str, say: Say) -> tuple[Path, ImageInfo]:
    """The root file system's tar, and the image of it, which is loaded when the engine lacks it."""
    tar = rootfs.build_rootfs(paths, spec, say)
    found = engine.image(ref)
    # Labels are inherited: only the bytes tell that it is this root file system and nothing on top of it.
    if found is None or found.diff_ids != (f"sha256:{sha256_file(tar)[0]}",):
        say(f"loading the root file system for {spec.platform}")
        architecture = spec.platform.partition("/")[2]
        labels = {"sparkpin.rootfs": spec.key}
        with progress(say, tar.stat().st_size, after=UNPACKS) as sent:
            found = engine.import_rootfs(tar, ref, architecture=architecture, labels=labels, sent=sent)
    return tar, found


def require_builder(paths: Paths, engine: Engine, rendered: RenderedImage, say: Say) -> rootfs.RootfsSpec | None:
    """What the steps run in where the engine's machine is of another architecture than the image; else None."""
    if f"ARG {BUILDER}=" not in rendered.dockerfile or (machine := engine.platform) == rendered.platform:
        return None
    spec = rendered.builder
    if spec is None or spec.platform != machine:
        spec = cross_build.stand_in(paths, rendered.stack, machine)
    require_rootfs(paths, engine, spec, rootfs_ref(spec.suite, spec.key), say)
    return spec


def has_contents(paths: Paths, diff_ids: Sequence[str]) -> bool:
    return all(layer_file(paths, diff_id).is_file() for diff_id in diff_ids)


def keep_contents(paths: Paths, diff_id: str, contents: Callable[[], Contents]) -> None:
    """The listing of a layer beside the records, and for other homes that share the cache."""
    files = (layer_file(paths, diff_id), cached_contents(paths, diff_id))
    if lacking := [file for file in files if not file.is_file()]:
        listed = contents()
        for file in lacking:
            write_contents(file, listed)


def cached_contents(paths: Paths, diff_id: str) -> Path:
    return paths.cache / "layers" / layer_file(paths, diff_id).name


@dataclass(frozen=True)
class Made:
    """layers: name of a tree -> diff ID of the layer that it became."""

    sealed: OciImage
    layers: dict[str, str]


@dataclass(frozen=True)
class Maker:
    """From a context to the sealed image: each new layer is taken alone, and the engine gets no layer that it has.

    builder: what the steps run in, None for what the Dockerfile says.
    keeps_notes: for later builds, of which layer became of which inputs.
    """

    paths: Paths
    engine: Engine
    rendered: RenderedImage
    parent: ImageInfo
    builder: str | None
    context: Path
    work: Path
    say: Say
    fresh: bool
    keeps_notes: bool
    told: set[str] = field(default_factory=set)

    @property
    def unsealed(self) -> str:
        return unsealed_ref(self.rendered.stage, self.rendered.key)

    def made(self) -> Made:
        """The engine's own, dated image lives only meanwhile, under a tag that nothing else reads."""
        try:
            return self.from_trees()
        finally:
            with contextlib.suppress(EngineError):  # it must not hide why the build ended
                self.engine.untag(self.unsealed)

    def tell(self, line: str) -> None:
        """Each line once: the stages' common steps come in every build, from the engine's cache."""
        if line not in self.told:
            self.told.add(line)
            self.say(f"{self.rendered.stage}: {line}")

    def build(
        self,
        tag: str | None = None,
        *,
        target: str | None = None,
        output: Path | None = None,
        context: Path | None = None,
    ) -> None:
        buildkit.build(
            context or self.context,
            tag,
            say=self.tell,
            target=target,
            output=output,
            platform=self.rendered.platform,
            no_cache=self.fresh,
            arguments={BUILDER: self.builder} if self.builder else {},
            host=self.engine.host,
        )

    def from_trees(self) -> Made:
        self.build(self.unsealed, target="config")
        image = self.image()
        if image.diff_ids != self.parent.diff_ids:
            raise BuildError(
                f"{self.rendered.stage}: the stage `config` of its Dockerfile adds layers",
                next_step="let it set only ENV, USER, CMD, LABEL and the like; layers come from the trees",
            )
        parts: list[Part] = list(self.parent.diff_ids)
        new = list(self.rendered.layers)
        became = dict[str, str]()
        while not self.fresh and new and (past := self.known(new[0][1])):
            if not self.engine.has_layers([*self.parent.diff_ids, *became.values(), past]):
                break
            became[new.pop(0)[0]] = past
        with contextlib.ExitStack() as opened:
            with ThreadPoolExecutor(PARALLEL_TREES) as pool:
                layers = list(pool.map(lambda row: self.make_tree(row[0], opened), new))
            filled = [(*row, layer) for row, layer in zip(new, layers, strict=True) if layer.members]
            parts += [*became.values(), *(layer for _, _, layer in filled)]
            self.tell("sealing and loading")
            sealed = self.load(parts, image)
            for (name, key, layer), diff_id in zip(filled, sealed.diff_ids[len(parts) - len(filled) :], strict=True):
                keep_contents(self.paths, diff_id, functools.partial(contents_of, layer))
                became[name] = diff_id
                if self.keeps_notes:
                    write_json(self.note(key), {"diff_id": diff_id})
        return Made(sealed, became)

    def make_tree(self, name: str, opened: contextlib.ExitStack) -> CanonicalLayer:
        """Trees are made side by side, each from a folder of its own. opened: closes the tree's tar.

        BuildKit keeps one copy of a context folder up to date for all its builds and sends each only the files that it
        asks for; two at once took files away from each other (20.10).
        """
        tar = self.work / f"{name}.tar"
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self.work) as folder:
            context = Path(folder, "context")
            shutil.copytree(self.context, context, copy_function=os.link)
            stage, below = self.tree_stage(name)
            layer = read_layer_of(tar, lambda: self.build(target=stage, output=tar, context=context), folder=below)
        opened.callback(layer.source.close)
        return layer

    def tree_stage(self, name: str) -> tuple[str, bytes]:
        """The stage that gives a tree, and the tree's folder there. On our own root file system that is the one that
        installs it: the engine's copy of gigabytes, file by file, takes longer than the 100 MB more that come out."""
        made = (f"\nFROM venv AS {name}\n", f"\nFROM scratch AS {name}-tree\nCOPY --from={name} /layer/ /\n")
        if self.rendered.rootfs and all(text in self.rendered.dockerfile for text in made):
            return name, b"layer"
        return f"{name}-tree", b""

    def image(self) -> ImageInfo:
        image = self.engine.image(self.unsealed)
        if image is None:
            raise EngineError(f"the engine built {self.unsealed} and does not have it", next_step="invoke build")
        return image

    def load(self, parts: Sequence[Part], image: ImageInfo) -> OciImage:
        with progress(self.say, sum(part.size for part in parts if not isinstance(part, str)), after=UNPACKS) as sent:
            return self.engine.load_sealed(
                parts,
                image.config,
                os=image.os,
                architecture=image.architecture,
                tag=self.rendered.ref,
                sizes=Sizes(self.paths.cache / "layers"),
                sent=sent,
            )

    def known(self, key: str) -> str | None:
        """The sealed diff ID of a layer that an earlier run made from the same inputs, whose contents are known."""
        try:
            diff_id = str(json.loads(self.note(key).read_text(encoding="utf-8"))["diff_id"])
            contents = read_contents(cached_contents(self.paths, diff_id))
            keep_contents(self.paths, diff_id, lambda: contents)
        except (OSError, ValueError, KeyError, TypeError, IntegrityError):
            return None
        return diff_id

    def note(self, key: str) -> Path:
        return self.paths.cache / "layers" / f"{key}.json"

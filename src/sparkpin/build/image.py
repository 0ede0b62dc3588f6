"""Building: a rendered stage becomes a sealed, loaded and tagged image, or is found done.

Each new layer is made alone, as a tree of files that the engine gives out as a tar, and no layer is sent to the engine
that it has.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build import record as records
from sparkpin.build import rootfs
from sparkpin.build.context import fill, require_own_uv
from sparkpin.build.record import BuildRecord, LayerRecord, RenderedImage, layer_file
from sparkpin.build.render import BUILDER, require_closed
from sparkpin.build.rootfs import native_stack
from sparkpin.core.errors import BuildError, DifferenceError, EngineError, IntegrityError
from sparkpin.core.files import disk_errors, lock, sha256_file, write_json
from sparkpin.core.paths import Paths
from sparkpin.core.tags import rootfs_ref, unsealed_ref
from sparkpin.core.terminal import say
from sparkpin.host import buildkit
from sparkpin.host.content_store import Sizes
from sparkpin.host.engine import Engine
from sparkpin.host.images import ImageInfo
from sparkpin.image.layer_tar import CanonicalLayer, read_layer
from sparkpin.image.listing import Contents, contents_of, read_contents, write_contents
from sparkpin.image.oci import OciImage
from sparkpin.pins.manifests import load_stack
from sparkpin.releases.kept_inputs import KeptInputs

PARALLEL_TREES = 3  # one installs while another is copied: the engine waits for its disk half of the time


def find_built(paths: Paths, engine: Engine, rendered: RenderedImage, expected: str | None = None) -> ImageInfo | None:
    """The image, if the engine has it with the build key and the very configuration and layers that were recorded.

    What another machine recorded counts only for who expects that very config digest: its key is what it claims.
    """
    try:
        known = records.read_record(records.record_file(paths, rendered))
    except (FileNotFoundError, IntegrityError):
        return None
    image = engine.image(rendered.ref)
    is_same = image and (image.config_digest, list(image.diff_ids)) == (known.config_digest, known.diff_ids)
    is_listed = all(layer_file(paths, diff_id).is_file() for diff_id in known.diff_ids)
    is_trusted = known.config_digest == expected or not records.is_imported(paths, rendered)
    return image if is_same and is_listed and is_trusted else None


def build_image(paths: Paths, engine: Engine, rendered: RenderedImage, *, expected: str | None = None) -> ImageInfo:
    """Build, seal, load, tag and record one stage. Of two runs at once the second waits and finds it done.

    expected: the config digest that must come out; another is a DifferenceError, with neither tag nor record.
    """
    # The stages' common steps come in every build, from the engine's cache: each line is reported once.
    report = functools.cache(lambda line: say(f"{rendered.stage}: {line}"))
    waiting = f"{rendered.stage}: another run is building it; waiting"
    with lock(paths.locks / f"image-{rendered.key}.lock", on_wait=waiting):
        if found := find_built(paths, engine, rendered, expected):
            report(f"{rendered.ref} is there")
            return found
        require_closed(rendered.dockerfile, rendered.parent_ref)  # what is wrong with the request comes first
        require_own_uv(rendered, engine.platform)
        builder = require_builder(paths, engine, rendered)
        prefix = f"seal-{rendered.key[:12]}-"
        for left in paths.work.glob(f"{prefix}*"):  # by a killed run
            shutil.rmtree(left, ignore_errors=True)
        with disk_errors(paths.work):
            for folder in (paths.work, paths.images):
                folder.mkdir(parents=True, exist_ok=True)
            records.begun_mark(records.record_file(paths, rendered)).touch()
            with tempfile.TemporaryDirectory(prefix=prefix, dir=paths.work) as work:
                return ImageBuild(paths, engine, rendered, builder, Path(work), report).run(expected)


@dataclass(frozen=True)
class ImageBuild:
    """The build of one image that is not there. builder: where its steps run, if not in the image itself; work: an
    empty folder, for the context and for the tars of trees."""

    paths: Paths
    engine: Engine
    rendered: RenderedImage
    builder: rootfs.RootfsSpec | None
    work: Path
    report: Callable[[str], None]

    def run(self, expected: str | None) -> ImageInfo:
        started, rendered = time.monotonic(), self.rendered
        parent = require_parent(self.paths, self.engine, rendered)
        # Made again from such a record it stays one, and its layers are none that another build may take.
        imported = expected is not None and records.is_imported(self.paths, rendered)
        inputs = fill(self.work / "context", KeptInputs.of(self.paths), rendered)
        sealed, layers = self.make(parent)
        image = self.require_loaded(sealed, expected or sealed.config_digest)
        for name, key in () if imported else rendered.layers:
            if name in layers:
                write_json(layer_note(self.paths, key), {"diff_id": layers[name]})
        record = BuildRecord(
            **records.shared_fields(rendered),
            builder=self.builder,
            context=inputs,
            layers=[LayerRecord(name=name, key=key, diff_id=layers.get(name)) for name, key in rendered.layers],
            config=sealed.config.decode(),
            config_digest=sealed.config_digest,
            diff_ids=list(sealed.diff_ids),
            size=image.size,
            seconds=round(time.monotonic() - started, 3),
        )
        records.write_record(self.paths, record, imported=imported)
        self.report(f"{rendered.ref} in {record.seconds:.1f} s")
        return image

    def make(self, parent: ImageInfo) -> tuple[OciImage, dict[str, str]]:
        """The image, loaded, and what its trees became: name -> diff ID, of those that are not empty.

        The engine's own, dated image lives only meanwhile, under a tag that nothing else reads.
        """
        try:
            layers = self.layers_here(parent)
            new = [name for name, _ in self.rendered.layers[len(layers) :]]
            with contextlib.ExitStack() as opened:
                with ThreadPoolExecutor(PARALLEL_TREES) as pool:
                    config = pool.submit(self.build_config, parent)
                    trees = zip(new, pool.map(lambda name: self.build_tree(name, opened), new), strict=True)
                    filled = {name: tree for name, tree in trees if tree.members}
                image = config.result()
                self.report("sealing and loading")
                below, sizes = [*parent.diff_ids, *layers.values()], Sizes(self.paths.cache / "layers")
                target = {"os": image.os, "architecture": image.architecture, "tag": self.rendered.ref}
                sealed = self.engine.load_sealed([*below, *filled.values()], image.config, **target, sizes=sizes)
                for (name, tree), diff_id in zip(filled.items(), sealed.diff_ids[len(below) :], strict=True):
                    keep_contents(self.paths, diff_id, functools.partial(contents_of, tree))
                    layers[name] = diff_id
        finally:
            with contextlib.suppress(EngineError):  # it must not hide why the build ended
                self.engine.untag(self.unsealed)
        return sealed, layers

    def layers_here(self, parent: ImageInfo) -> dict[str, str]:
        """The lowest layers that an earlier build made of the same inputs and that the engine still has, by name."""
        found: dict[str, str] = {}
        for name, key in self.rendered.layers:
            if (diff_id := known_layer(self.paths, key)) is None:
                break
            found[name] = diff_id
        while found and not self.engine.image_above([*parent.diff_ids, *found.values()]):
            found.popitem()
        return found

    def require_loaded(self, sealed: OciImage, expected: str) -> ImageInfo:
        """DifferenceError, and the tag goes, where another was expected, or the engine has another than was sealed."""
        ref, image = self.rendered.ref, self.engine.image(self.rendered.ref)
        if image is None or {image.config_digest, expected} != {sealed.config_digest}:
            self.engine.untag(ref)
            cause = f"{ref}: got {sealed.config_digest}, as {image and image.config_digest}, expected {expected}"
            step = "invoke reproduce TAG (on the machine that has the release) prints what differs"
            raise DifferenceError(cause, next_step=step)
        return image

    @property
    def unsealed(self) -> str:
        return unsealed_ref(self.rendered.stage, self.rendered.key)

    def build_config(self, parent: ImageInfo) -> ImageInfo:
        """The settings of the image, as an image that adds no layer to its parent."""
        self.build(self.work / "context", "config", "--tag", self.unsealed)
        image = self.engine.image(self.unsealed)
        if image is None or image.diff_ids != parent.diff_ids:
            step = "let it set only ENV, USER, CMD, LABEL and the like; layers come from the trees"
            raise BuildError(f"{self.rendered.stage}: its Dockerfile adds layers in its stage `config`", next_step=step)
        return image

    def build_tree(self, name: str, opened: contextlib.ExitStack) -> CanonicalLayer:
        """Trees are made side by side, each from a folder of its own. opened: closes the tree's tar.

        BuildKit keeps one copy of a context folder up to date for all its builds and sends each only the files that it
        asks for; two at once took files away from each other (20.10).
        """
        tar = self.work / f"{name}.tar"
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self.work) as folder:
            context = Path(folder, "context")
            shutil.copytree(self.work / "context", context, copy_function=os.link)
            target, below = self.tree_stage(name)
            self.build(context, target, "--output", f"type=tar,dest={tar}")
        return read_layer(opened.enter_context(tar.open("rb")), folder=below)

    def tree_stage(self, name: str) -> tuple[str, bytes]:
        """The stage that gives a tree, and the tree's folder there. On our own root file system that is the one that
        installs it: the engine's copy of gigabytes, file by file, takes longer than the 100 MB more that come out."""
        installs = f"\nFROM venv AS {name}\n" in self.rendered.dockerfile
        return (name, b"built/layer") if self.rendered.rootfs and installs else (f"{name}-tree", b"")

    def build(self, context: Path, target: str, *words: str) -> None:
        words += ("--target", target, "--platform", self.rendered.platform)
        if self.builder:
            words += ("--build-arg", f"{BUILDER}={rootfs_ref(self.builder.suite, self.builder.key)}")
        buildkit.build(context, *words, report=self.report, host=self.engine.host)


def require_parent(paths: Paths, engine: Engine, rendered: RenderedImage) -> ImageInfo:
    """The image that the stage stands on; the root file system is made when the engine lacks it."""
    if rendered.rootfs:
        tar, parent = require_rootfs(paths, engine, rendered.rootfs, rendered.parent_ref)
        with tar.open("rb") as file:
            keep_contents(paths, parent.diff_ids[0], lambda: contents_of(read_layer(file, everything=True)))
        return parent
    if (found := engine.image(rendered.parent_ref)) is None:
        raise BuildError(f"{rendered.stage}: the engine has no {rendered.parent_ref}", next_step="invoke build")
    return found


def require_rootfs(paths: Paths, engine: Engine, spec: rootfs.RootfsSpec, ref: str) -> tuple[Path, ImageInfo]:
    """The root file system's tar, and the image of it, which is loaded when the engine lacks it."""
    tar = rootfs.build_rootfs(paths, engine, spec)
    found = engine.image(ref)
    # Labels are inherited: only the bytes show that it is this root file system and nothing on top of it.
    if found is None or found.diff_ids != (f"sha256:{sha256_file(tar)[0]}",):
        say(f"loading the root file system for {spec.platform}")
        architecture = spec.platform.partition("/")[2]
        labels = {"sparkpin.rootfs": spec.key}
        found = engine.import_rootfs(tar, ref, architecture=architecture, labels=labels)
    return tar, found


def require_builder(paths: Paths, engine: Engine, rendered: RenderedImage) -> rootfs.RootfsSpec | None:
    """What the steps run in where the engine's machine is of another architecture than the image; else None."""
    if f"ARG {BUILDER}=" not in rendered.dockerfile or (machine := engine.platform) == rendered.platform:
        return None
    spec = rendered.builder
    if spec is None or spec.platform != machine:
        spec = rootfs.rootfs_spec(*native_stack(paths, load_stack(paths.project, rendered.stack), machine))
    require_rootfs(paths, engine, spec, rootfs_ref(spec.suite, spec.key))
    return spec


def keep_contents(paths: Paths, diff_id: str, contents: Callable[[], Contents]) -> None:
    """The listing of a layer next to the records, and for other data directories that share the cache."""
    files = (layer_file(paths, diff_id), cached_contents(paths, diff_id))
    if lacking := [file for file in files if not file.is_file()]:
        listed = contents()
        for file in lacking:
            write_contents(file, listed)


def cached_contents(paths: Paths, diff_id: str) -> Path:
    return paths.cache / "layers" / layer_file(paths, diff_id).name


def layer_note(paths: Paths, key: str) -> Path:
    """What the inputs of a layer became. Data directories share the notes, as they share the engine."""
    return paths.cache / "layers" / f"{key}.json"


def known_layer(paths: Paths, key: str) -> str | None:
    """The diff ID of the sealed layer that an earlier build made of the same inputs, if its contents are known."""
    note = layer_note(paths, key)
    diff_id = str(json.loads(note.read_text(encoding="utf-8"))["diff_id"]) if note.is_file() else ""
    if not (diff_id and (cached := cached_contents(paths, diff_id)).is_file()):
        return None
    keep_contents(paths, diff_id, lambda: read_contents(cached))
    return diff_id

"""`invoke export` and `invoke import`: a release to and from a file, a registry or another engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sparkpin.cli.options import Authority
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.distribute import copy as transfer
from sparkpin.distribute import export as exporting
from sparkpin.distribute import registry, take_in
from sparkpin.host import machine
from sparkpin.host.engine import engine_of
from sparkpin.host.skopeo import Registry
from sparkpin.pins.nodes import nodes_of
from sparkpin.releases.record import SIGNATURE, Release, Releases

Kind = Literal["file", "registry", "engine"]
REGISTRY, ENGINES = "oci://", ("ssh://", "unix://", "tcp://")
FITS: Mapping[str, tuple[Kind, ...]] = {
    "--with-store": ("file",),
    "--no-image": ("file",),
    "--require-signature": ("file",),
    "--with-checkpoint": ("file", "engine"),
    "--redistribute": ("registry",),
    "--unsigned": ("registry",),
    "--ca": ("registry",),
    "--deep": ("engine",),
}


@dataclass(frozen=True)
class ExportOptions:
    """As the command line has them."""

    with_store: bool = False
    with_checkpoint: bool = False
    no_image: bool = False
    redistribute: bool = False
    ca: str = ""
    deep: bool = False


def kind_of(place: str) -> Kind:
    if place.startswith(REGISTRY):
        return "registry"
    return "engine" if place.startswith(ENGINES) else "file"


def require_fitting(place: str, given: Mapping[str, object]) -> None:
    """InputError for an option that means nothing for such a place. given: option -> its value."""
    for option, value in given.items():
        if value and kind_of(place) not in FITS[option]:
            raise InputError(
                f"{option} does not go with {place}, which is {'an' if kind_of(place) == 'engine' else 'a'} "
                f"{kind_of(place)}; it goes with a {' or an '.join(FITS[option])}",
                next_step=f"leave {option} out",
            )


@task("prove and carry")
def export(
    tag: Annotated[str, "release to export"],
    place: Annotated[str, "file to write, registry (oci://HOST/NAME) or engine (ssh://HOST, unix://..., tcp://...)"],
    *,
    with_store: Annotated[
        bool, "file: with every wheel, package and model file, to build image and checkpoint again offline"
    ] = False,
    with_checkpoint: Annotated[bool, "file, engine: with the finished checkpoint, to serve it offline"] = False,
    no_image: Annotated[bool, "file: records and inputs only, for a machine that has the image"] = False,
    redistribute: Annotated[
        bool, "registry: whoever reads there may have its NVIDIA wheels (docs/registry.md)"
    ] = False,
    ca: Authority = "",
    deep: Annotated[bool, "engine: hash all of a checkpoint that is there, as `promote --deep` does here"] = False,
) -> None:
    """Write a release to a file, a registry or another engine.

    invoke export v2-tq v2-tq.tar --with-checkpoint
    """
    options = ExportOptions(with_store, with_checkpoint, no_image, redistribute, ca, deep)
    require_fitting(place, {f"--{name.replace('_', '-')}": value for name, value in vars(options).items()})
    paths = Paths.from_env()
    releases = Releases(paths)
    if kind_of(place) == "registry":
        target = Registry.parse(place, options.ca)
        show(f"before anyone publishes an image: {registry.TERMS}, says what may be given to others")
        release = releases.get(tag)
        done = registry.publish(paths, engine_of(paths), release, target, agreed=options.redistribute)
        show(f"{tag} is published; elsewhere: invoke import {done}")
        if not (releases.evidence(release) / SIGNATURE).is_file():
            again = f"with a key: invoke verify {release.tag} --sign, then export again"
            show(f"not signed, so an import needs --unsigned; {again}")
    elif kind_of(place) == "engine":
        to_engine(paths, releases.get(tag), place, options)
    else:
        to_file(paths, releases.get(tag), Path(place), options)


def to_file(paths: Paths, release: Release, file: Path, options: ExportOptions) -> None:
    store, checkpoint = options.with_store, options.with_checkpoint
    if checkpoint and (Releases(paths).evidence(release) / SIGNATURE).is_file():
        say(
            "no signature covers the finished checkpoint, so `import --require-signature` refuses this bundle; "
            "--with-store in its place takes along what the checkpoint is made from, which the signature covers"
        )
    wanted = exporting.BundleParts(store=store, checkpoint=checkpoint, image=not options.no_image)
    size = exporting.export(paths, lambda: engine_of(paths), release, file, wanted)
    show(f"{file}: {release.tag}, {terminal.size(size)}")
    if not store and not checkpoint:
        show(
            "without its checkpoint: the other machine makes it from the model's files, which it has or fetches "
            "(--with-store and --with-checkpoint take along what a machine without network needs)"
        )
    show(f"next, on the other machine: invoke import {file.name}")


def to_engine(paths: Paths, release: Release, url: str, options: ExportOptions) -> None:
    if options.deep and not options.with_checkpoint:
        raise InputError("--deep: goes with --with-checkpoint", next_step=f"invoke export {release.tag} {url}")
    engine = engine_of(paths)
    if options.with_checkpoint:
        sent, carried = transfer.copy_with_checkpoint(paths, engine, release, url, deep=options.deep)
    else:
        sent = transfer.copy(paths, engine, release, url)
    show(
        f"{release.tag} is at {url}: sent {terminal.count(sent.layers, 'layer')}, {terminal.size(sent.bytes)}; "
        f"{terminal.count(sent.skipped, 'layer')} were there"
    )
    if options.with_checkpoint:
        speed = f", {carried.bytes / 1e6 / carried.seconds:.0f} MB/s over {url}" if carried.bytes else ""
        show(
            f"its checkpoint is in volume {carried.volume} there: sent {terminal.count(carried.files, 'file')}, "
            f"{terminal.size(carried.bytes)}{speed}; {terminal.count(carried.whole, 'file')} were there"
        )
    record = f"{release.name}.tar"
    if nodes_of(release.argv) > 1:
        show(f"next, once it is on each: invoke smoke {release.tag} --nodes here,{url},... (docs/nodes.md)")
        return
    show(f"next, for its record: invoke export {release.tag} {record} --no-image, and there: invoke import {record}")


@task("prove and carry")
def import_(
    place: Annotated[str, "a file that `export` wrote, or oci://HOST/NAME:TAG (or @sha256:DIGEST) of a registry"],
    *,
    require_signature: Annotated[bool, "file: refuse what nobody signed whom allowed_signers names"] = False,
    unsigned: Annotated[bool, "registry: take what nobody signed whom allowed_signers names, too"] = False,
    ca: Authority = "",
) -> None:
    """Verify a release that was exported, then take it in."""
    require_fitting(place, {"--require-signature": require_signature, "--unsigned": unsigned, "--ca": ca})
    paths = Paths.from_env()
    if kind_of(place) == "engine":
        raise InputError(
            f"{place}: a release is taken in from a file or a registry",
            next_step="on that machine: invoke export TAG ssh://user@this-host",
        )
    if kind_of(place) == "registry":
        source = Registry.parse(place, ca)
        done = registry.pull(paths, engine_of(paths), source, unsigned=unsigned)
    elif not Path(place).is_file():  # before an engine is asked
        raise InputError(f"{place}: got no such file, expected one that `export` wrote", next_step="invoke import FILE")
    else:
        done = take_in.import_bundle(paths, engine_of(paths), Path(place), signed=require_signature)
    for check in done.checks:
        show(check.line)
    tag = done.release.tag
    show(f"{tag} is here, {done.release.state}: another machine's smoke test proves nothing here")
    serve = machine.serve_command(paths.project, done.release.recipe)
    if Releases(paths).current_tag(done.release.recipe) == tag:
        show(f"it is the current release already; next: {serve}")
    elif done.release.smoke_passed:
        show(f"next: invoke promote {tag}, then {serve}")
    else:
        show(f"next: invoke smoke {tag}, then invoke serve {tag}")

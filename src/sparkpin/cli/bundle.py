"""`invoke export` and `invoke import`: a release to and from a file, a registry or another engine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from sparkpin.cli.tasks import Authority, task
from sparkpin.core.errors import InputError
from sparkpin.core.files import atomic_folder, output_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, show, size
from sparkpin.distribute import engines, machine, registry, transfer
from sparkpin.host.engine import engine_of
from sparkpin.host.skopeo import Registry
from sparkpin.releases.record import SIGNATURE, Release, Releases

Kind = Literal["file", "registry", "machine"]
FITS: Mapping[Kind, tuple[str, ...]] = {
    "file": ("--with-store", "--require-signature"),
    "registry": ("--redistribute", "--ca", "--unsigned"),
    "machine": ("--with-checkpoint", "--deep", "--require-signature"),
}


def kind_of(place: str) -> Kind:
    if place.startswith("oci://"):
        return "registry"
    return "machine" if place.startswith(("ssh://", "unix://", "tcp://")) else "file"


def require_fitting(kind: Kind, **given: object) -> None:
    """InputError for an option that means nothing for such a place. given: options, with _ for -, and their values."""
    for option in [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        if option not in FITS[kind]:
            cause = f"{option} does not go with a place of this kind ({kind})"
            raise InputError(cause, next_step=f"the same command without {option}")


@task("verify and distribute")
def export(
    tag: Annotated[str, "release to export"],
    place: Annotated[str, "file to write, registry (oci://HOST/NAME) or engine (ssh://HOST, unix://..., tcp://...)"],
    *,
    with_store: Annotated[
        bool, "file: with every wheel, package and model file, to build image and checkpoint again offline"
    ] = False,
    with_checkpoint: Annotated[bool, "ssh://: and its checkpoint, by rsync"] = False,
    redistribute: Annotated[
        bool, "registry: confirm that its readers may have the NVIDIA wheels (docs/registry.md)"
    ] = False,
    ca: Authority = "",
    deep: Annotated[bool, "engine: hash all of a checkpoint that is there, as `promote --deep` does here"] = False,
) -> None:
    """Write a release to a file, a registry or another engine.

    invoke export v2-tq v2-tq.tar --with-store
    """
    kind = kind_of(place)
    require_fitting(kind, with_store=with_store, with_checkpoint=with_checkpoint)
    require_fitting(kind, redistribute=redistribute, ca=ca, deep=deep)
    paths = Paths.from_env()
    release = Releases(paths).get(tag)
    if kind == "registry":
        to_registry(paths, release, Registry.parse(place, ca), agreed=redistribute)
    elif kind == "machine":
        to_engine(paths, release, place, checkpoint=with_checkpoint, deep=deep)
    else:
        to_file(paths, release, place, store=with_store)


def to_file(paths: Paths, release: Release, place: str, *, store: bool) -> None:
    """A place that ends with a slash is a folder."""
    engine, target = engine_of(paths), output_file("PLACE", place, like=f"{release.name}.tar")
    with atomic_folder(target) if place.endswith("/") else contextlib.nullcontext(target) as where:
        written = transfer.export(paths, engine, release, where, store=store)
    show(f"{place}: {release.tag}, {size(written)}")
    if not store:
        show("the other machine fetches what its checkpoint is made of (--with-store: it needs no network)")
    show(f"next, on the other machine: invoke import {Path(place).name}")


def to_registry(paths: Paths, release: Release, place: Registry, *, agreed: bool) -> None:
    show(f"before anyone publishes an image: {registry.TERMS}, says what may be given to others")
    done = registry.publish(paths, engine_of(paths), release, place, agreed=agreed)
    show(f"{release.tag} is published; elsewhere: invoke import {done}")
    if not (Releases(paths).evidence(release) / SIGNATURE).is_file():
        show(f"not signed, so an import needs --unsigned; with a key: invoke verify {release.tag} --sign, export again")


def to_engine(paths: Paths, release: Release, url: str, *, checkpoint: bool, deep: bool) -> None:
    if deep and not checkpoint:
        raise InputError("--deep: goes with --with-checkpoint", next_step=f"invoke export {release.tag} {url}")
    sent = engines.copy(paths, engine_of(paths), release, url, checkpoint=checkpoint, deep=deep)
    show(f"{release.tag} is at {url}: sent {count(sent.sent, 'layer')}, {size(sent.bytes)}; {sent.there} were there")
    if checkpoint:
        show(f"and its checkpoint, in {sent.checkpoint}")
    show(f"next, for its record: invoke export {release.tag} FILE, and there: invoke import FILE")


@task("verify and distribute")
def import_(
    place: Annotated[
        str, "what `export` wrote, oci://HOST/NAME:TAG (or @sha256:DIGEST) of a registry, or ssh://HOST[/CHECKOUT]"
    ],
    tag: Annotated[str | None, "release of the machine behind ssh://"] = None,
    *,
    require_signature: Annotated[
        bool, "file, ssh: refuse a release that no signer in allowed_signers has signed"
    ] = False,
    unsigned: Annotated[bool, "registry: accept a release without a trusted signature"] = False,
    ca: Authority = "",
) -> None:
    """Verify a release that was exported, then take it in.

    invoke import v2-tq.tar
    invoke import ssh://me@spark2/home/me/sparkpin v2-tq
    """
    kind = kind_of(place)
    require_fitting(kind, require_signature=require_signature, unsigned=unsigned, ca=ca)
    paths = Paths.from_env()
    if place.startswith("ssh://") != bool(tag) or (kind == "machine" and not tag):
        got = f"a tag with {place}" if tag else f"{place} and no tag"
        raise InputError(f"got {got}, expected FILE, oci://... or ssh://HOST TAG", next_step="invoke import --help")
    if tag:
        done = machine.pull(paths, engine_of(paths), place, tag, signed=require_signature)
    elif kind == "registry":
        done = registry.pull(paths, engine_of(paths), Registry.parse(place, ca), unsigned=unsigned)
    else:
        done = transfer.import_bundle(paths, engine_of(paths), Path(place), signed=require_signature)
    for check in done.checks:
        show(check.line)
    show(f"{done.release.tag} is here, {done.release.state}: another machine's smoke test proves nothing here")
    if not done.release.smoke_passed:
        show(f"next: invoke smoke {done.release.tag}, then invoke serve {done.release.tag}")

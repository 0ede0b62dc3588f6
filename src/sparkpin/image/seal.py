"""Sealing: from what an engine built to the one archive that every engine's build of it comes to.

An engine on overlay2 already has the parent's layers and does not read them from the archive of a `docker load`; one on
containerd's store takes an index that names them by their blobs. So layers that the engine has are left out.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from sparkpin.core.epoch import EPOCH
from sparkpin.image import oci
from sparkpin.image.archive import END, Slice, file_header, padding
from sparkpin.image.layer_tar import CanonicalLayer
from sparkpin.image.oci import OciImage, OciLayer

CONFIG = "config.json"
VERSION = 1  # counts changes of the canonical form: it is a part of every build key
CREATED_BY = "sparkpin"
CREATED = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(EPOCH))
PROCESS_KEYS = ("Cmd", "Entrypoint", "Env", "Shell", "StopSignal", "User", "WorkingDir")
OTHER_KEYS = ("ExposedPorts", "Healthcheck", "Labels", "Volumes")

Part = CanonicalLayer | Slice | str
"""A layer to be sealed: its canonical content, its tar as it is, or the diff ID of one that the engine has."""


def image_config(config: Mapping[str, Any], *, os: str, architecture: str, diff_ids: Sequence[str]) -> bytes:
    """The canonical configuration: chosen keys that say something, and nothing about when, where and by what."""
    event = {"created": CREATED, "created_by": CREATED_BY}
    value = {
        "architecture": architecture,
        "config": {key: config[key] for key in (*PROCESS_KEYS, *OTHER_KEYS) if config.get(key)},
        "created": CREATED,
        "history": [event for _ in diff_ids],
        "os": os,
        "rootfs": {"diff_ids": list(diff_ids), "type": "layers"},
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def seal(
    parts: Sequence[Part],
    config: Mapping[str, Any],
    *,
    os: str,
    architecture: str,
    tag: str,
    below: Sequence[OciLayer] | None = None,
) -> Generator[bytes, None, OciImage]:
    """The archive for `docker load` in pieces, in one pass: layers, configuration, manifest.

    The same parts and configuration give the same bytes. Memory does not grow with the size of the layers.
    parts: lowest first, those that the engine has before the others. below: the blobs of the engine's layers in
    containerd's store; None for an engine that keeps layers otherwise.
    """
    names, diff_ids, blobs = list[str](), list[str](), list(below or ())
    for part in parts:
        names.append(f"layers/{len(names):03}.tar")
        if isinstance(part, str):
            diff_ids.append(part)
            continue
        yield file_header(names[-1], part.size)
        written = hashlib.sha256()
        for chunk in part.chunks():
            written.update(chunk)
            yield chunk
        yield padding(part.size)
        diff_ids.append(f"sha256:{written.hexdigest()}")
        blobs.append(OciLayer(diff_ids[-1], part.size))
    written_config = image_config(config, os=os, architecture=architecture, diff_ids=diff_ids)
    image = OciImage(written_config, tuple(diff_ids), (tag,))
    yield oci.member(CONFIG, image.config)
    if below is not None:
        yield from oci.index_members(image, blobs)
    yield oci.member(oci.ARCHIVE_MANIFEST, json.dumps([oci.archive_row(CONFIG, names, image.tags)]).encode()) + END
    return image

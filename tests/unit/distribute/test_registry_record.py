"""What a hostile registry offers as a release's record, by a stand-in: refused before anything is fetched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sparkpin.core.errors import IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.distribute import layout, registry
from sparkpin.distribute.layout import Row
from sparkpin.host.skopeo import Registry
from sparkpin.image import oci
from sparkpin.image.oci import digest_of

IMAGE = b'{"layers": []}'
LARGE = [
    Row(title=f"{layout.INPUTS}{number:064x}", digest=f"sha256:{number:064x}", size=1 << 28) for number in range(5)
]
HOSTILE = {
    "too large": layout.artifact("a", LARGE, IMAGE),
    "a row beyond all limits": layout.artifact("a", [LARGE[0].model_copy(update={"size": 1 << 50})], IMAGE),
    **{
        f"more than a record, {title[:12]}": layout.artifact("a", [LARGE[0].model_copy(update={"title": title})], IMAGE)
        for title in (layout.CHECKPOINT, f"{layout.CHECKPOINTS}{0:064x}", f"{layout.STORE}{0:064x}")
    },
    "no digest": layout.artifact("a", [LARGE[0].model_copy(update={"digest": "sha256:../../etc/passwd"})], IMAGE),
    "no rows": layout.artifact("a", [], IMAGE),
    "no subject": layout.artifact("a", LARGE[:1], None),
    "a subject that leads elsewhere": layout.artifact("a", LARGE[:1], IMAGE).replace(
        digest_of(IMAGE).encode(), b"sha256:../../etc/passwd"
    ),
    "an image": oci.manifest(b"{}", []),
    "no manifest": b"[" * 100_000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_record_is_refused_before_it_is_fetched(tmp_path: Path, case: str) -> None:
    place: Any = "a place that nobody may ask"
    with pytest.raises(IntegrityError) as refused:
        registry.fetch_record(place, HOSTILE[case], tmp_path)
    assert len(refused.value.message) < 3000 and not list(tmp_path.iterdir())


def test_a_blob_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """skopeo writes what comes and compares it at the end. Like any program in Go it goes on past the signal."""
    tools, made = tmp_path / "tools", tmp_path / "made"
    tools.mkdir()
    (tools / "skopeo").write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec dd if=/dev/zero bs=1M count=64 of={made}\n")
    (tools / "skopeo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    with pytest.raises(IntegrityError):
        Registry.parse("oci://localhost/a:b").fetch(tmp_path, ":b", "a", 1 << 20)
    assert made.stat().st_size < 8 << 20


def test_what_a_killed_run_left(tmp_path: Path) -> None:
    """Its whole blobs stay, for nobody else to read; one that came in part goes."""
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    with registry.working(paths, "pull-x") as folder:
        whole, broken = (folder / oci.blob(digest_of(data)) for data in (b"whole", b"more than that"))
        whole.write_bytes(b"whole")
        broken.write_bytes(b"more")
    with registry.working(paths, "pull-x") as folder:
        assert whole.is_file() and not broken.exists()
        assert folder.stat().st_mode & 0o777 == 0o700

"""What a hostile registry offers as a release's record, by a stand-in: refused before anything is fetched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sparkpin.core.errors import IntegrityError
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
    "more than a record": layout.artifact(
        "a", [LARGE[0].model_copy(update={"title": f"{layout.STORE}{0:064x}"})], IMAGE
    ),
    "no digest": layout.artifact("a", [LARGE[0].model_copy(update={"digest": "sha256:../../etc/passwd"})], IMAGE),
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

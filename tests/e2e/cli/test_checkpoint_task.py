"""`invoke build --checkpoint-only`, as a person runs it, for the scripted model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import Checkout

MTP = ("build", "--checkpoint-only", "--recipe", "scripted-tiny", "--stage", "mtp")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    root = tmp_path_factory.mktemp("task")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKPIN_CACHE", str(root / "cache"))
        yield Checkout.make(root / "copy")


def test_plan_and_build(copy: Checkout) -> None:
    said = copy.done(*MTP, "--dry-run")
    assert "12 replaced, 12 added, 29 listed, 0 dropped" in said
    assert re.search(r"of fp8 \(.*\): 24 tensors of 0\.2 MB, out of \d", said)
    assert re.search(r"^disk: [1-9].* needed at .*, .* free$", said, re.MULTILINE)
    assert not copy.home.exists(), "a dry run makes nothing"
    models = [path.name for path in Path(copy.env["SPARKPIN_CACHE"]).rglob("*.safetensors")]
    assert models == [], "a plan needs headers only"

    made = Path(copy.done(*MTP).strip().splitlines()[-1])
    assert (made / "sparkpin.json").is_file()
    assert "disk: 0 B needed" in copy.done(*MTP, "--dry-run")

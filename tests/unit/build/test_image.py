"""What becomes of the trees of a stage. tests/engine/build/test_build.py has whole builds."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import pytest
from layer_samples import layer, member

from sparkpin.build.image import ImageBuild, cached_contents
from sparkpin.core.errors import EngineError
from sparkpin.core.paths import Paths
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.oci import OciImage
from sparkpin.image.seal import Part, seal


class Loading:
    """An engine as far as a load needs one."""

    def image_above(self, diff_ids: list[str]) -> None:
        return None

    def load_sealed(
        self, parts: list[Part], config: Any, *, os: str, architecture: str, tag: str, **_: Any
    ) -> OciImage:
        pieces = seal(parts, config, os=os, architecture=architecture, tag=tag)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                return cast(OciImage, end.value)

    def untag(self, ref: str) -> None:
        pass


TREES = {"first": [member("opt/a", b"a")], "empty": [member("tmp/left", b"")], "last": [member("opt/b", b"b")]}
BELOW = "sha256:" + "0" * 64
IMAGE: Any = SimpleNamespace(config={}, os="linux", architecture="amd64", diff_ids=(BELOW,))


class Steps(ImageBuild):
    """The build of an image of these trees, which no engine makes."""

    def build_config(self, parent: object) -> Any:
        return IMAGE

    def build_tree(self, name: str, opened: object) -> Any:
        return read_layer(cast(BinaryIO, io.BytesIO(layer(TREES[name]))))


def steps(folder: Path, engine: object) -> Steps:
    rendered: Any = SimpleNamespace(stage="base", key="0" * 64, ref="x:z", layers=[(name, name * 12) for name in TREES])
    paths = Paths(folder, folder / "cache", folder / "home")
    return Steps(paths, cast(Any, engine), rendered, None, folder, lambda line: None)


def test_an_empty_tree_is_no_layer(tmp_path: Path) -> None:
    build = steps(tmp_path, Loading())
    sealed, layers = build.make(IMAGE)
    assert list(layers) == ["first", "last"] and sealed.diff_ids == (BELOW, *layers.values())
    assert all(cached_contents(build.paths, diff_id).is_file() for diff_id in layers.values())


def test_an_engine_that_fails_is_not_asked_again(tmp_path: Path) -> None:
    asked = []

    class Broken(Loading):
        def load_sealed(self, *_: Any, **__: Any) -> OciImage:
            asked.append("load")
            raise EngineError("it went away")

    with pytest.raises(EngineError):
        steps(tmp_path, Broken()).make(IMAGE)
    assert asked == ["load"]

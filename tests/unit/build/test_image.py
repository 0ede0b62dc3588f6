"""What becomes of the trees of a stage. tests/engine/build/test_build.py has whole builds."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from layer_samples import layer, member

from sparkpin.build.image import ImageBuild, cached_contents
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


def test_an_empty_tree_is_no_layer(tmp_path: Path) -> None:
    trees = {"first": [member("opt/a", b"a")], "empty": [member("tmp/left", b"")], "last": [member("opt/b", b"b")]}

    below = "sha256:" + "0" * 64
    image: Any = SimpleNamespace(config={}, os="linux", architecture="amd64", diff_ids=(below,))
    rendered: Any = SimpleNamespace(stage="base", key="0" * 64, ref="x:z", layers=[(name, name * 12) for name in trees])
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")

    class Steps(ImageBuild):
        def build_config(self, parent: object) -> Any:
            return image

        def build_tree(self, name: str, opened: object) -> Any:
            return read_layer(cast(BinaryIO, io.BytesIO(layer(trees[name]))))

    sealed, layers = Steps(paths, cast(Any, Loading()), rendered, None, tmp_path, lambda line: None).make(image)
    assert list(layers) == ["first", "last"] and sealed.diff_ids == (below, *layers.values())
    assert all(cached_contents(paths, diff_id).is_file() for diff_id in layers.values())

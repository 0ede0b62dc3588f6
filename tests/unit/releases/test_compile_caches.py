"""What is compiled at run time stays from start to start, and no other build meets it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from made_releases import release

from sparkpin.releases import compile_caches, container


def test_one_volume_for_each_build_key() -> None:
    assert compile_caches.volume_name("f" * 64) != compile_caches.volume_name("0" * 64)


def test_every_cache_lies_in_the_volume_unless_the_release_says_otherwise() -> None:
    """The variables belong to how it is run, and to no key."""
    made = dataclasses.replace(release(1), env={"VLLM_CACHE_ROOT": "/tmp/mine", "MAX_JOBS": "3"})
    for one in (release(1), made):
        settings = container.options(one, Path("/checkpoint"), memory=1 << 36, gpus=True, cache="the-volume")
        assert settings["volumes"]["the-volume"] == {"bind": compile_caches.HOME, "mode": "rw"}
        assert settings["environment"] == {**container.ENV, **one.env}
    folders = {name: value for name, value in compile_caches.ENV.items() if name != "CUDA_CACHE_MAXSIZE"}
    assert folders.items() <= container.ENV.items()
    assert all(f"{value}/".startswith(f"{compile_caches.HOME}/") for value in folders.values())

"""What is compiled at run time stays from start to start, and no other build meets it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from made_releases import release

from sparkpin.releases import compile_caches, container


def test_one_volume_for_each_build_key() -> None:
    assert compile_caches.volume_name("3114c5a02382" + "0" * 52) == "sparkpin-cache-3114c5a02382"
    assert compile_caches.volume_name("f" * 64) != compile_caches.volume_name("0" * 64)


def test_every_cache_lies_in_the_volume() -> None:
    settings = container.options(release(1), Path("/checkpoint"), memory=None, gpus=True, cache="the-volume")
    assert settings["volumes"]["the-volume"] == {"bind": compile_caches.HOME, "mode": "rw"}
    folders = {name: value for name, value in settings["environment"].items() if name in compile_caches.ENV}
    assert int(folders.pop("CUDA_CACHE_MAXSIZE")) == 4 * 2**30
    assert set(folders) >= {
        "VLLM_CACHE_ROOT",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "CUDA_CACHE_PATH",
    }
    assert all(
        value == compile_caches.HOME or value.startswith(f"{compile_caches.HOME}/") for value in folders.values()
    )


def test_the_variables_are_in_no_key() -> None:
    """They belong to how it is run: a release from before keeps its tag and gets them, too."""
    made = release(1)
    settings = container.options(made, Path("/checkpoint"), memory=None, gpus=False, cache="v")
    assert made.env == {"NUMBER": "1"}
    assert settings["environment"] == {**container.ENV, "NUMBER": "1"}


def test_a_release_may_say_otherwise() -> None:
    made = dataclasses.replace(release(1), env={"VLLM_CACHE_ROOT": "/tmp/mine"})
    settings = container.options(made, Path("/checkpoint"), memory=None, gpus=False, cache="v")
    assert settings["environment"]["VLLM_CACHE_ROOT"] == "/tmp/mine"

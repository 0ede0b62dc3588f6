"""What is compiled at run time stays from start to start, and no other build meets it."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import PROJECT
from in_container import output_of
from made_releases import release

from sparkpin.build.pair import pair
from sparkpin.host.engine import Engine
from sparkpin.releases import compile_caches, container
from sparkpin.releases.record import Release


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


LOOK = """
import json, os, pathlib
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
from vllm.model_executor.models.registry import ModelRegistry
import vllm.envs

code = "answer = 42  # made at run time"
_, module = PyCodeCache.write(code)
info = ModelRegistry._try_inspect_model_cls("Qwen3_5MoeForCausalLM")
models = sorted(path.name for path in pathlib.Path(vllm.envs.VLLM_CACHE_ROOT, "modelinfos").iterdir())
seen = {
    "inductor": cache_dir(),
    "triton": triton_cache_dir(0),
    "vllm": vllm.envs.VLLM_CACHE_ROOT,
    "module": module,
    "written": os.stat(module).st_mtime_ns,
    "inspected": info is not None and bool(models),
    "models": {name: os.stat(f"{vllm.envs.VLLM_CACHE_ROOT}/modelinfos/{name}").st_mtime_ns for name in models},
}
print("SEEN " + json.dumps(seen))
"""


@pytest.fixture
def base(tmp_path: Path) -> Iterator[tuple[Engine, Release, Path]]:
    """The base image of the cpu stack, as a release of a build key that nobody else has."""
    made = pair(PROJECT, "scripted-tiny", stage="base")[-1].rendered
    engine = Engine.connect()
    image = engine.image(made.ref)
    assert image, "invoke build --stage base makes it"
    wanted = dataclasses.replace(
        release(1),
        tag=made.ref,
        build_key=uuid.uuid4().hex * 2,
        image=image.config_digest,
        env={"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    yield engine, wanted, checkpoint
    engine.client.volumes.get(compile_caches.volume_name(wanted.build_key)).remove(force=True)


@pytest.mark.e2e
def test_what_one_start_compiled_the_next_one_finds(base: tuple[Engine, Release, Path]) -> None:
    """In real containers, by the code of PyTorch and vLLM that writes these caches; a CPU has no others to show."""

    def start() -> dict[str, object]:
        options = container.options(
            made, checkpoint, memory=8 << 30, gpus=False, cache=container.cache_volume(engine, made)
        )
        text = output_of(engine, made.tag, [], entrypoint=["python3", "-c", LOOK], **options)
        lines = [line for line in text.splitlines() if line.startswith("SEEN ")]
        return dict(json.loads(lines[-1].removeprefix("SEEN ")))

    engine, made, checkpoint = base
    first = start()
    assert first["inspected"]
    assert str(first["module"]).startswith(f"{compile_caches.ROOT}/inductor/")
    assert (first["inductor"], first["vllm"]) == (f"{compile_caches.ROOT}/inductor", f"{compile_caches.ROOT}/vllm")
    assert str(first["triton"]).startswith(f"{compile_caches.ROOT}/triton")
    assert start() == first, "the files of the first start, not written again"

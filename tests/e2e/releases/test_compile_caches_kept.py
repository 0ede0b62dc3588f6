"""What one start compiled at run time the next one finds."""

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

pytestmark = pytest.mark.slow

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

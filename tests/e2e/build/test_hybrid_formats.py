"""More of a checkpoint in FP8 than the stages take: attention over INT4, and the MTP layer with its experts.

The same repositories and other rules, through lock, plan and build, into the image's vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from checkout import PROJECT
from in_container import run

from benchmarks.scripted_tiny import scripts
from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.checkpoint.steps import all_steps
from sparkpin.core.paths import Paths
from sparkpin.fetch.lock_model import lock_model
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.releases import container
from sparkpin.releases.record import Release

pytestmark = pytest.mark.slow

MODULES = [
    "model.*.mlp.shared_expert.*_proj",
    "model.*.self_attn.*_proj",
    "model.*.linear_attn.in_proj_qkv",
    "model.*.linear_attn.in_proj_z",
    "model.*.linear_attn.out_proj",
    "mtp.layers.*_proj",
]


def checkpoint(project: Path, work: Path) -> Path:
    """Built from a copy of the pin with other rules, in a cache and a home of its own."""
    path = project / "pins/models/scripted-tiny.yaml"
    pinned = yaml.safe_load(path.read_text())
    pinned["hybrid"]["rules"][0]["modules"] = MODULES
    path.write_text(yaml.safe_dump(pinned))
    paths = Paths(project, work / "cache", work / "home")
    lock, pin = lock_model(paths, "scripted-tiny"), manifests.load_model(project, "scripted-tiny")
    return build_checkpoint(paths, pin, lock, all_steps(pin))


def test_attention_and_the_mtp_layer_in_fp8(project: Path, tmp_path: Path, stages: dict[str, Release]) -> None:
    folder = checkpoint(project, tmp_path)
    extra = json.loads((folder / "config.json").read_text())["quantization_config"]["extra_config"]
    assert sum(entry["bits"] == 8 for entry in extra.values()) == 12 + 4 + 9 + (4 + 3 + 4 * 3)
    engine, release = Engine.connect(), stages["mtp"]
    code, out, err = run(
        engine,
        release.tag,
        ["python", "/mods/hybrid-int4-fp8/tests/load_checkpoint.py", "/model"],
        environment={
            **container.ENV,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        volumes={
            str(PROJECT / "mods"): {"bind": "/mods", "mode": "ro"},
            str(folder): {"bind": "/model", "mode": "ro"},
            container.cache_volume(engine, release): {"bind": container.HOME, "mode": "rw"},
        },
        tmpfs={"/tmp": ""},
    )
    assert code == 0, out[-4000:] + err[-4000:]
    result = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])
    linear = [f"model.layers.{i}.linear_attn.{part}" for i in (0, 1, 2) for part in ("in_proj_qkvz", "out_proj")]
    full = [f"layers.{{}}.self_attn.{part}" for part in ("qkv_proj", "o_proj")]
    shared = [f"layers.{{}}.mlp.shared_expert.{part}" for part in ("gate_up_proj", "down_proj")]
    body = linear + [f"model.{name.format(3)}" for name in full]
    body += [f"model.{name.format(i)}" for i in range(4) for name in shared]
    assert result["layers"] == dict.fromkeys(body, True)
    assert result["drafter"] == dict.fromkeys([f"model.{name.format(0)}" for name in full + shared], True)
    assert [f"model.layers.{i}.linear_attn.in_proj_ba" in result["plain"] for i in (0, 1, 2)] == [True] * 3
    assert '"event":"active","version":"0.1.0","fp8_layers":21,' in out + err
    for answer, script in zip(result["answers"], (scripts.CHAT, scripts.LONG), strict=True):
        assert answer.endswith(script.expected_content)
    assert result["accepted"] == result["drafted"] > 100

"""All mods of the chain in one engine of two real processes (tensor parallelism), against the same engine of one.

The scripted model's wide form, whose parts are whole in halves. Two containers of a release for two nodes are the
business of tests/e2e/serve.
"""

from __future__ import annotations

import configparser
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from checkout import PROJECT
from in_container import run

from benchmarks.scripted_tiny import scripts
from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.checkpoint.steps import all_steps
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests
from sparkpin.releases import container
from sparkpin.releases.record import Release

pytestmark = pytest.mark.slow

MTP = {"method": "mtp", "num_speculative_tokens": 2}
LISTED = {
    "speculative_config": MTP | {"use_local_argmax_reduction": True},
    "additional_config": {"draft_vocabulary": {"first": 450}},
}
"""450 of 1024 tokens and the added ones, which come last: some in each half, and not all that is said among them."""
VOCABULARY = "draft-vocabulary"


def checkpoint(work: Path) -> Path:
    paths, pin = Paths(PROJECT, work / "cache", work / "home"), manifests.load_model(PROJECT, "scripted-wide")
    lock = manifests.load_model_lock(PROJECT, pin)
    return build_checkpoint(paths, pin, lock, all_steps(pin))


def installed(folder: Path) -> Path:
    """What installing draft-vocabulary, which no image of this chain has, would leave beside its package."""
    project = tomllib.loads((PROJECT / "mods" / VOCABULARY / "pyproject.toml").read_text())["project"]
    about = folder / f"sparkpin_draft_vocabulary-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = configparser.ConfigParser()
    points.read_dict(project["entry-points"])
    with (about / "entry_points.txt").open("w") as file:
        points.write(file)
    return folder


def served(release: Release, folder: Path, ranks: int, options: dict[str, Any], *more: Path) -> tuple[Any, list[Any]]:
    """What serve_ranks.py found, and the mods' reports. more: folders for the path of Python."""
    python_path = [f"/more/{number}" for number in range(len(more))]
    volumes = {str(path): {"bind": at, "mode": "ro"} for path, at in zip(more, python_path, strict=True)}
    code, out, err = run(
        Engine.connect(),
        release.tag,
        ["python", "/mods/modkit/tests/serve_ranks.py", "/model", str(ranks), json.dumps(options)],
        environment={
            **container.ENV,
            **release.env,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": ":".join(python_path),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
        volumes={
            str(PROJECT / "mods"): {"bind": "/mods", "mode": "ro"},
            str(folder): {"bind": "/model", "mode": "ro"},
            **volumes,
        },
        tmpfs={"/tmp": "exec"},
        shm_size="1g",
    )
    assert code == 0, out[-6000:] + err[-4000:]
    lines = (out + err).splitlines()
    reports = [json.loads(line.partition("SPARKPIN_MOD ")[2]) for line in lines if "SPARKPIN_MOD {" in line]
    return json.loads(next(line for line in lines if line.startswith("RESULT "))[7:]), reports


def of(reports: list[Any], mod: str, event: str = "active") -> list[Any]:
    return [report for report in reports if report["mod"] == mod and report["event"] == event]


def answers_are_right(result: Any) -> None:
    wanted = (scripts.CHAT, scripts.LONG, scripts.CHAT)
    for answer, script in zip(result["answers"], wanted, strict=True):
        assert answer.endswith(script.expected_content)


def test_two_ranks_draft_from_a_list_what_one_drafts(stages: dict[str, Release], tmp_path: Path) -> None:
    """Each rank chooses the INT8 scales of its half, so single drafts may differ: the answers do not."""
    folder = checkpoint(tmp_path)
    more = PROJECT / "mods" / VOCABULARY, installed(tmp_path / "more")
    pair, reports = served(stages["v2-tq"], folder, 2, LISTED, *more)
    alone, single = served(stages["v2-tq"], folder, 1, LISTED, *more)
    for result in (pair, alone):
        answers_are_right(result)
        assert 0 < result["accepted"] < result["drafted"]
    [whole], shards = of(single, VOCABULARY), of(reports, VOCABULARY)
    assert "own" not in whole and len(shards) == 2 and all(one["shards"] == 2 for one in shards)
    assert sorted(one["own"] for one in shards) == sorted([450, whole["tokens"] - 450])
    for found, columns in ((single, 8), (reports, 5)):
        assert {head["outlier_columns"] for head in of(found, "int8-lm-head")} == {columns}
    assert not of(single, "modkit", "agreed")

"""benchmarks/nodes: what of it needs no GPU."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
from checkout import PROJECT
from doc_tables import table

sys.path += [str(PROJECT / "benchmarks/nodes"), str(PROJECT / "benchmarks/stage_table")]

import pair

import stages
from sparkpin.pins.nodes import NODES, TENSOR, on_loopback, words_at


def result(step: float) -> dict[str, dict[str, dict[str, float]]]:
    return {"decode": {f"{context}:{batch}": {"step_ms": step} for context, batch in pair.POINTS}}


def test_the_table_finds_what_made_up_results_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10 ms on one; on two 5 and 108 exchanges of 20 microseconds, more by what each packet is late."""
    made = {pair.ONE: result(10), pair.NVLINK: result(5)}
    made |= {job: result(5 + 0.108 * (20 + pair.delay_of(job))) for job in pair.JOBS if job.startswith(pair.SOCKETS)}
    for job, found in made.items():
        (tmp_path / f"{job}.json").write_text(json.dumps(found))
    pair.main([str(tmp_path), "--show"])
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(pair.POINTS) and head[-1] == "exchanges"
    assert {tuple(line[-2:]) for line in lines} == {("2.16", "108")}
    (tmp_path / "sockets+100.json").unlink()
    pair.main([str(tmp_path), "--show"])
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "-"


def test_the_table_of_the_readme_is_what_was_kept() -> None:
    kept = PROJECT / "benchmarks/nodes/data/2026-11-28-two-h200"
    _, *wanted = pair.rows({job: json.loads((kept / f"{job}.json").read_text()) for job in (pair.NVLINK, pair.SOCKETS)})
    shown = table("benchmarks/nodes/README.md", "context:users | nvlink | sockets")
    assert [tuple(cells[:4]) for cells in shown] == [cells[:4] for cells in wanted]


@pytest.mark.parametrize("job", ["two", "nvlink+5", "sockets+x", "one+1"])
def test_a_job_that_is_none_is_refused(job: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="wanted"):
        pair.main([str(tmp_path), job])


def test_ranks_differ_where_they_must() -> None:
    first, second = (pair.more_arguments(pair.NVLINK, rank) for rank in (0, 1))
    assert {key for key in first if first[key] != second[key]} == {"node_rank"}
    alone = pair.more_arguments(pair.ONE, 0)
    assert set(first) & set(stages.arguments(stages.STAGES["v2"])) == set(alone)
    # The words that `invoke serve` adds on one host, as arguments.
    words = [word for word in words_at([NODES, "2", TENSOR, "2"], on_loopback(1)) if word.startswith("--")]
    named = {word.removeprefix("--").replace("-", "_") for word in words} - {"headless"}
    assert named == set(second) - set(alone) - {"distributed_executor_backend"}
    assert "NCCL_P2P_DISABLE" in pair.environment("sockets+25", 1, Path("/o"))
    assert "NCCL_P2P_DISABLE" not in pair.environment(pair.NVLINK, 1, Path("/o"))


def test_vllm_finds_the_plugin(tmp_path: Path) -> None:
    pair.plugin(tmp_path)
    [found] = importlib.metadata.distributions(path=[str(tmp_path / "plugin")])
    [entry] = found.entry_points
    assert (entry.group, entry.load()) == ("vllm.general_plugins", pair.install)


def test_a_job_that_fails_leaves_no_older_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no tc
    (tmp_path / "sockets+25.json").write_text(json.dumps(result(1)))
    assert pair.run_job("sockets+25", "v2", tmp_path).startswith("tc: ")
    assert not (tmp_path / "sockets+25.json").exists()

"""What a report is made of: four releases with smoke results, benchmarks, a comparison and a protected one."""

from __future__ import annotations

import json

import pytest
from evidence_samples import copy_of_project, make_sample
from places import PROJECT

from sparkpin.core.paths import Paths
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.measure.bench import record as bench
from sparkpin.releases import quality_record as quality
from sparkpin.releases.protection import protect
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.memory_limit import plan_of

Made = tuple[Paths, list[Release]]
HOSTILE = "<script>document.title='ran'</script><img src=http://elsewhere.invalid/report.png onerror=alert(1)>\"'&"


HOST = Fingerprint(
    machine="",
    arch="x86_64",
    cpu="made up",
    cores=2,
    memory=8 << 30,
    gpus=[],
    os="debian 12",
    kernel="6.1",
    docker="20",
)


def smoked(paths: Paths, release: Release, *, passed: bool, detail: str, seconds: float) -> Release:
    checks = [
        {"name": "start", "passed": True, "detail": f"ready after {seconds} s", "applicable": True},
        {"name": "chat", "passed": passed, "detail": detail, "applicable": True},
        {"name": "image", "passed": True, "detail": "the model has no eyes", "applicable": False},
    ]
    result = {"passed": passed, "seconds": 40.0, "ready_seconds": seconds, "acceptance": 0.75, "checks": checks}
    return Releases(paths).smoked(release.tag, {**result, "mods": ["modkit"]})


def figure(value: float) -> quality.Figure:
    return quality.Figure(value=value, low=value - 0.001, high=value + 0.001)


JUDGED = (
    quality.Judged(name="kl", limit=0.02, seen=figure(0.012), kept="within"),
    quality.Judged(name="tool_calls", limit=0.0, seen=figure(0.25), kept="more"),
)


def comparison(
    release: Release, reference: Release, judged: tuple[quality.Judged, ...] = JUDGED
) -> quality.QualityRecord:
    texts = quality.Texts(
        kind="all", texts=4, tokens=800, kl=figure(0.012), top1=figure(0.97), perplexity_reference=9.1, perplexity=9.3,
        ratio=figure(1.02), continued=100, continued_kl=figure(0.01), continued_same=figure(0.9),
    )  # fmt: skip
    return quality.QualityRecord(
        release=release.tag, reference=reference.tag, role="parent", time="2026-01-03T01:00:00Z", seconds=9.0,
        vllm_release="0.32.0", vllm_reference="0.32.0", host=HOST, corpus="ab" * 32, top_k=20, texts=(texts,),
        skills=(quality.Skill(name="tool calls", asked=8, reference=8, release=6, lost=figure(0.25)),), judged=judged,
        notes=(HOSTILE,),
    )  # fmt: skip


def compared(paths: Paths, release: Release, reference: Release) -> None:
    made = comparison(release, reference)
    path = quality.folder_of(paths, release) / f"{reference.recipe}-{reference.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(quality.to_json(made)))


def benched(paths: Paths, release: Release, rate: float, tokens: int = 64, day: int = 3) -> None:
    ttft, decode, prefill = (bench.Metric.of([one]) for one in (20.0, rate, 800.0))
    cells = [
        bench.CellResult(
            name=name, kind=kind, response_size=tokens, prompt_size=20 if kind == "prompt" else 128, concurrency=users,
            seconds=64 / (rate * users), completed=1, failed=0, output_tokens=64, later_parts=30, later_tokens=61,
            pp_throughput=prefill, pp_req_throughput=prefill, tg_throughput=decode, tg_req_throughput=decode,
            ttfr=ttft, e2e_ttft=ttft, drafted=60, accepted=45,
        )
        for name, kind, users in (("Math", "prompt", 1), ("128 x1", "sweep", 1), ("128 x4", "sweep", 4))
    ]  # fmt: skip
    conditions = bench.Conditions(
        release=release.tag, image=release.image, host=HOST, vllm="0.32.0", argv=release.argv,
        env={}, server="started",
    )  # fmt: skip
    made = bench.BenchRecord(
        timestamp=f"2026-01-{day:02}T02:00:00Z", model="tiny", max_concurrency=4,
        conditions=conditions, benchmarks=tuple(cells),
        start_seconds=30.0, memory=1 << 30,
        ceiling=100.0,
    )  # fmt: skip
    bench.save(paths, release, made)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Four releases: base and hybrid of one build; a second base that is current, with a setting of its own; a third
    whose smoke test failed. The third alone has a comparison and benchmarks, with the first."""
    where = tmp_path_factory.mktemp("report")
    hybrid = make_sample(where, "hybrid").release
    releases = [make_sample(where, "base", created="2026-01-02T00:00:00Z").release, hybrid]
    for day, (old, new) in enumerate((("max_num_seqs: 4", "max_num_seqs: 2"), ("max_num_seqs: 4", "max_num_seqs: 1"))):
        project = copy_of_project(where / f"project{day}")
        recipe = project / "recipes/scripted-tiny.yaml"
        assert old in recipe.read_text()
        recipe.write_text(recipe.read_text().replace(old, new))
        releases.append(make_sample(where, "base", project, f"2026-01-0{day + 3}T00:00:00Z").release)
    paths = Paths(PROJECT, where / "cache", where / "home")
    records = Releases(paths)
    smoked(paths, releases[0], passed=True, detail="24 tokens, exact", seconds=30.9)
    current = smoked(paths, releases[2], passed=True, detail="24 tokens, exact", seconds=19.2)
    smoked(paths, releases[3], passed=False, detail=HOSTILE, seconds=77.7)
    records.point(current)
    protect(records, releases[0], HOSTILE)
    compared(paths, releases[2], releases[0])
    benched(paths, releases[0], 28.3)
    benched(paths, releases[2], 38.4)
    plan_of(paths, current)  # brings the headers, of the model that is generated here
    return paths, [records.get(release.tag) for release in releases]

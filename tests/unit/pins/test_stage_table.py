"""benchmarks/stage_table: what is carried to a GPU, what runs there, and how a profile is read."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import statistics
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import PROJECT

sys.path.append(str(PROJECT / "benchmarks/stage_table"))

import buckets
import fatbin
import join
import prepare
import report
import shapes
import table as stage_table
from figures import CHAIN
from shapes import GEOMETRY

import stages
from sparkpin.pins import manifests


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + payload


def binary(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return fatbin.MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


LIBRARY = b"".join(
    [
        b"ELF" + fatbin.MAGIC + b"no header, but its first four bytes",
        binary(entry(fatbin.CUBIN, 90, b"keep" * 8), entry(fatbin.CUBIN, 120, b"drop" * 8)),
        b"between",
        binary(entry(fatbin.PTX, 80, b"text" * 8)),
        b"end",
    ]
)


@pytest.mark.parametrize("ptx", [False, True])
def test_one_architecture_is_kept_in_place(ptx: bool) -> None:
    data, kept = fatbin.slim(LIBRARY, 90, ptx=lambda _: ptx)
    wanted = LIBRARY.replace(b"drop" * 8, bytes(32))
    assert data == (wanted if ptx else wanted.replace(b"text" * 8, bytes(32)))
    assert kept == ({(fatbin.CUBIN, 90): 32, (fatbin.PTX, 80): 32} if ptx else {(fatbin.CUBIN, 90): 32})


def test_an_entry_that_reaches_too_far_stops() -> None:
    broken = binary(entry(fatbin.CUBIN, 90, b"x" * 32)[:-8])
    with pytest.raises(ValueError, match="fat binary at 0x0: an entry at 0x10 of kind 2"):
        fatbin.slim(broken, 90)


def flash(head: int, kind: str, switches: str) -> bytes:
    """A cubin with a kernel's mangled name in it."""
    shape = f"ILi2EN4cute5tupleIJNS5_1CILi1EEES8_EEENS6_IJNS7_ILi128EEENS7_ILi{head}EEEEEELi{head}E"
    name = f"5flash..CollectiveMainloopFwdSm90{shape}NS_{kind}EfNS_4arch4Sm90E{switches}NS_10bfloat16_tELi1E"
    return name.encode().ljust(256, b".")


BFLOAT16, HALF, FP8 = "10bfloat16_t", "6half_t", "12float_e4m3_t"
CAUSAL, SPLIT = "Lb1ELb0E", "Lb0ELb1E"
BOTH = [flash(head, kind, how) for head in (64, 256) for kind in (BFLOAT16, HALF) for how in (CAUSAL, SPLIT)]


def test_flash_attention_of_the_two_models_is_carried_for_both_types() -> None:
    others = [flash(128, HALF, CAUSAL), flash(256, FP8, CAUSAL)]
    library = binary(*(entry(fatbin.CUBIN, 90, cubin) for cubin in BOTH + others))
    slim, kept = fatbin.slim(library, 90, prepare.needed_cubin)
    assert kept == {(fatbin.CUBIN, 90): 256 * len(BOTH)}
    prepare.check_flash(slim)


@pytest.mark.parametrize("gone", [(3,), (4, 5, 6, 7), (6, 7)], ids=["one of float16", "a head size", "float16"])
def test_flash_attention_that_is_not_all_there_is_not_carried(gone: tuple[int, ...]) -> None:
    """A kernel's name stands in the library's own tables, too, whether its code is there or not."""
    names = b"".join(BOTH)
    library = names + binary(*(entry(fatbin.CUBIN, 90, c) for i, c in enumerate(BOTH) if i not in gone))
    with pytest.raises(RuntimeError, match=r"kernels for bfloat16 and \d for float16, wanted the same"):
        prepare.check_flash(library)


def kernel(name: str, at: float, took: float, launch: int) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": at, "dur": took, "args": {"correlation": launch}}


def launch(number: int, at: float) -> dict[str, object]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "args": {"correlation": number}}


def scope(name: str, at: float, took: float) -> dict[str, object]:
    return {"cat": "user_annotation", "name": f"scope:{name}", "ts": at, "dur": took}


def test_a_kernel_belongs_to_the_innermost_scope_that_launched_it() -> None:
    events = [
        scope("sample_tokens", 0, 100), scope("sample", 10, 20), scope("propose", 50, 20),
        launch(1, 5), launch(2, 15), launch(3, 40), launch(4, 60), launch(5, 200),
        *(kernel(f"k{i}", 1000 - i, 1, i) for i in (1, 2, 3, 4, 5)),
    ]  # fmt: skip
    rows = buckets.rows_of(events)
    assert [(name, where) for name, _, _, where in rows] == [
        ("k5", ""), ("k4", "propose"), ("k3", "sample_tokens"), ("k2", "sample"), ("k1", "sample_tokens"),
    ]  # fmt: skip


def layer(core: str) -> list[tuple[str, float, str]]:
    names = ["gemm<machete::M>", core, "triton_poi_fused_machete_mm_mul", "gemm<machete::M>"]
    names += ["nvjet_router", "topkGating", "marlin_moe_wna16::Marlin", "moe_sum_vec"]
    return [(name, 2.0, "execute_model") for name in names]


def in_order(kernels: list[tuple[str, float, str]]) -> list[buckets.Row]:
    return [(name, float(i), took, where) for i, (name, took, where) in enumerate(kernels)]


@pytest.mark.parametrize(
    ("core", "part"),
    [
        ("flash::FlashAttnFwdSm90", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel", "attention"),
        ("attend", "attention"),
        ("merge(Args)", "attention"),
        ("store", "attention"),
        ("merge_16x16_to_64x64_inverse_kernel", "GDN"),  # of the linear attention's prefill
        ("fused_recurrent_gated_delta_rule_fwd_kernel", "GDN"),
        ("triton_poi_fused_index_put_slice_store", "GDN"),
    ],
)
def test_whose_core_a_kernel_is(core: str, part: str) -> None:
    found = buckets.parts_of(in_order(layer(core)), layers=1)
    assert (found["attention"], found["GDN"]) == ((8.0, 0.0) if part == "attention" else (0.0, 8.0))


@pytest.mark.parametrize(
    "kernels", [[], layer("attend")[:-1], 3 * layer("attend")], ids=["none", "cut", "three layers"]
)
def test_a_profile_that_is_not_of_whole_steps_is_no_result(kernels: list[tuple[str, float, str]]) -> None:
    with pytest.raises(ValueError, match=r"\d kernels moe_sum, wanted one in each of 2 layers"):
        buckets.parts_of(in_order(kernels), layers=2)


def test_parts_of_two_layers_in_two_steps() -> None:
    step = [
        ("void flash::prepare_varlen_num_blocks_kernel", 1.0, "execute_model"),  # in front of a layer without attention
        *layer("gdn_decode"), *layer("flash::FlashAttnFwd"),
        ("nvjet_head", 300.0, "sample"), ("_gumbel", 5.0, "sample"),
        ("int8_head", 20.0, "propose"), ("nvjet_small", 7.0, "propose"),
    ]  # fmt: skip
    assert buckets.parts_of(in_order(step * 2), layers=2) == {
        "attention": 9.0, "GDN": 8.0, "experts": 12.0, "shared experts": 4.0, "head": 300.0, "draft": 7.0,
        "draft head": 20.0, "sampling": 5.0, "other": 0.0, "steps": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(("fp8", "draft", "eight_bit"), [(False, False, 0), (True, False, 144), (True, True, 919)])
def test_the_config_has_the_shapes_of_the_122b(fp8: bool, draft: bool, eight_bit: int) -> None:
    config = shapes.config(fp8=fp8, fp8_draft=draft)
    assert config["layer_types"].count("full_attention") == GEOMETRY.attention
    assert config["num_hidden_layers"] == GEOMETRY.attention + GEOMETRY.linear == 48
    entries = config["quantization_config"]["extra_config"].values()
    assert sum(entry["bits"] == 8 for entry in entries) == eight_bit == 144 * fp8 + (4 + 3 + 3 * 256) * draft


def test_stages_differ_in_what_they_say() -> None:
    assert set(stages.CHAIN) < set(stages.STAGES)
    for name in stages.CHAIN:
        stage = stages.STAGES[name]
        made = stages.arguments(stage)
        assert json.loads(json.dumps(made)) == made
        assert ("speculative_config" in made) == stage.drafts == (name not in ("base", "hybrid"))
        assert made.get("kv_cache_dtype") == ("turboquant_4bit_nc" if name == "v2-tq" else None)
        on = [mod for mod, switch in stage.environment.items() if switch == "1"]
        assert len(on) == {"base": 0, "hybrid": 1, "mtp": 1, "v2": 2, "v2-tq": 3}[name]


@pytest.mark.parametrize(("job", "match"), [("v2-tq@turns", None), ("v2@match", 32)])
def test_a_conversation_is_a_prefix_cache_and_nothing_else(
    job: str, match: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    ran: list[str] = []

    class Measured:
        def __init__(self, stage: stages.Stage, out: Path, label: str, *, compiled: bool, **more: Any) -> None:
            asked.update(stages.arguments(stage, compiled=compiled) | more)
            ran.append(label)

        def case(self, run: Callable[[], None], what: str) -> None:
            ran.append(what)

        def free(self) -> None:
            ran.append("free")

    for name in ("randomly", "uniform", "measure"):  # they want a GPU's packages
        module = SimpleNamespace(install=lambda: None, Measured=Measured)
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    (tmp_path / stage_table.READY).touch()
    name, _, option = job.partition("@")
    stage_table.run_stage(name, tmp_path, option)
    assert ran == [f"{name}-{option}", "turns 32768", "free"]
    wanted = {"enable_prefix_caching": True, "kv_transfer_config": None, "prefix_match_unit": match}
    assert {key: asked[key] for key in wanted} == wanted and asked["speculative_config"]["num_speculative_tokens"] == 2
    flags = json.loads((PROJECT / "src/sparkpin/community/vllm/0.33.0.json").read_text())["flags"]
    assert {"--" + key.replace("_", "-") for key in wanted} <= set(flags)


def test_each_prompt_of_a_conversation_begins_with_all_that_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []
    answers: list[list[int]] = []

    class Engine:
        """Nothing in the first step, then an answer in parts. What was cached is told with the first."""

        def add_request(self, name: str, prompt: dict[str, list[int]], params: SimpleNamespace) -> str:
            prompts.append(prompt["prompt_token_ids"])
            answers.append([-len(prompts)] * params.max_tokens)
            self.parts = [[], answers[-1][:3], answers[-1][3:]]
            return name

        def step(self) -> list[SimpleNamespace]:
            part, cached = self.parts.pop(0), 7 * len(prompts) if len(self.parts) == 1 else 0
            said = SimpleNamespace(outputs=[SimpleNamespace(token_ids=part)], num_cached_tokens=cached)
            said.finished = not self.parts
            return [said] if part else []

    vllm = SimpleNamespace(SamplingParams=SimpleNamespace, RequestOutputKind=SimpleNamespace(DELTA=1), Uniform=None)
    for name in ("vllm", "vllm.sampling_params", "uniform"):
        monkeypatch.setitem(sys.modules, name, vllm)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "measure", raising=False)
    measure = importlib.import_module("measure")
    monkeypatch.delitem(sys.modules, "measure")  # it was made without its packages
    measured = measure.Measured.__new__(measure.Measured)
    vars(measured).update(
        engine=Engine(), random=measure.random.Random(0), ids=(100, 999), count=0, label="l", found={}
    )
    measured.turns(40)
    rows = measured.found["turns"]["40"]
    assert [row["prompt"] for row in rows] == [40 + turn * (measure.SAID + measure.HEARD) for turn in range(5)]
    assert [row["cached"] for row in rows] == [7, 14, 21, 28, 35] and all(row["first_token_s"] > 0 for row in rows)
    for turn in range(4):
        begun = prompts[turn] + answers[turn]
        assert prompts[turn + 1][: len(begun)] == begun and len(answers[turn]) == measure.SAID


@pytest.mark.parametrize("name", ["v2-vocab", "v3"])
def test_what_is_measured_has_the_stages_own_flags(name: str) -> None:
    flags = manifests.load_chain(PROJECT, name)[-1].serve.flags
    made = stages.arguments(stages.STAGES[name])
    assert made["additional_config"] == flags["--additional-config"]
    assert made["speculative_config"] == flags["--speculative-config"] | stages.SYNTHETIC
    assert made.get("mamba_ssm_cache_dtype") == flags.get("--mamba-ssm-cache-dtype")
    assert "use_local_argmax_reduction" not in stages.arguments(stages.STAGES["v2"])["speculative_config"]


def test_only_stages_that_draft_from_other_rows_have_the_mod() -> None:
    on = {name for name, stage in stages.STAGES.items() if stage.environment["SPARKPIN_MOD_DRAFT_VOCABULARY"] == "1"}
    assert on == {"v2-vocab", "v3"}


FACTS = {"date": "2026-11-23", "vllm": "0.33.0", "torch": "2.11.0", "gpu": "G", "driver": "1", "routing": "uniform",
         "jobs": "v2@few v2-own"}  # fmt: skip


def rows_of_steps(count: int) -> list[buckets.Row]:
    step = [*(layer("gdn") * 3 + layer("attend")) * 12, ("nvjet_head", 300.0, "sample"), ("marlin_moe", 9.0, "propose")]
    return in_order(step * count)


@pytest.fixture
def made_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What table.py writes: two stages, one of them with a profile, and a check of two stages."""
    monkeypatch.setattr(join, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(join, "TABLE", tmp_path / "table.json")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(FACTS))
    point = {"step_ms": 2.0, "windows_ms": [2.0], "tokens_per_s": 500.0}
    for label, stage in (("v2-few", "v2"), ("v2-own", "v2"), ("base", "base")):
        found = {"stage": stage, "decode": {"1024:1": point}, "took_s": {"decode 1024:1": 9.9}}
        (folder / f"{label}.json").write_text(json.dumps(found))
    for label in ("v2-few-1024-1", "v2-own-1024-16"):
        with gzip.open(folder / f"{label}.rows.gz", "wt") as file:
            json.dump(rows_of_steps(2), file)
    for stage, last in (("base", 3), ("hybrid", 3), ("v2", 4)):
        one = {"stage": stage, "ready_s": 1.0, "right": 2, "of": 2, "ids": [[1, 2], [last]]}
        (folder / f"check-{stage}.json").write_text(json.dumps(one))
    return folder


def test_results_are_kept_and_joined(made_results: Path, tmp_path: Path) -> None:
    join.main(["keep", str(made_results), "2026-11-23-b", "why"])
    join.main(["keep", str(made_results), "2026-11-23-a"])
    join.main([])
    first, second = json.loads((tmp_path / "table.json").read_text())["runs"]
    assert (first["name"], second["name"], second["note"]) == ("2026-11-23-a", "2026-11-23-b", "why")
    assert {key: second[key] for key in FACTS} == FACTS
    assert list(second["stages"]) == ["base", "v2", "v2-own"]
    v2 = second["stages"]["v2"]
    assert v2["parts_us"]["1024:1"]["GDN"] == 36 * 8.0 and v2["parts_us"]["1024:1"]["attention"] == 12 * 8.0
    assert v2["marlin_us"] == {"1024:1": 48 * 2.0} and v2["parts_us"]["1024:1"]["steps"] == 2.0
    assert list(second["stages"]["v2-own"]["parts_us"]) == ["1024:16"]
    assert "took_s" not in v2 and "parts_us" not in second["stages"]["base"]
    assert v2["decode"]["1024:1"]["step_ms"] == 2.0
    assert second["checks"]["hybrid"] == {"ready_s": 1.0, "right": 2, "of": 2, "tokens": 3, "same_as_before": True}
    assert "same_as_before" not in second["checks"]["base"] and "same_as_before" not in second["checks"]["v2"]
    assert not list(tmp_path.rglob(".part*"))


def test_a_profile_that_is_cut_is_told_and_the_rest_is_kept(made_results: Path) -> None:
    with gzip.open(made_results / "v2-few-1024-16.rows.gz", "wt") as file:
        json.dump(rows_of_steps(1)[:-20], file)
    join.main(["keep", str(made_results), "2026-11-23-a"])
    v2 = join.joined(join.RUNS)["runs"][0]["stages"]["v2"]
    assert list(v2["parts_us"]) == ["1024:1"] and "wanted one in each of 48 layers" in v2["errors"]["profile 1024:16"]


def test_the_last_run_of_a_stage_counts() -> None:
    def run(routing: str, **steps: float) -> dict[str, object]:
        return {"routing": routing, "stages": {name: {"stage": name, "step": ms} for name, ms in steps.items()}}

    made = {"runs": [run("uniform", v2=1, base=2), run("shared", mtp=3), run("uniform", v2=4)]}
    assert {name: one["step"] for name, one in join.latest(made, "uniform").items()} == {"base": 2, "v2": 4}
    assert list(join.latest(made, "uniform")) == ["base", "v2"]
    beside = {"stage": "v2", "step": 9}
    own = {"routing": "uniform", "stages": {"v2-own": beside, "base": {"stage": "base", "step": 5}}}
    found = join.latest({"runs": [*made["runs"], own]}, "uniform")
    assert {name: one["step"] for name, one in found.items()} == {"base": 5, "v2": 4}


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("run.json", None, "run.json: .*No such file.*wanted a JSON file as table.py writes it"),
        ("run.json", json.dumps(FACTS | {"driver": ""}), "run.json: driver: saw nothing, wanted date, vllm"),
        ("v2-few.json", "{", "v2-few.json: .*wanted a JSON file"),
        ("v2-few.json", '{"stage": "v3"}', "v2-few.json: stage: saw 'v3'"),
        ("v2-few.json", '{"stage": "mtp"}', "v2-few.json: stage: saw 'mtp', wanted the stage that the file is named"),
        ("v2.json", '{"stage": "v2"}', "v2.json: stage v2 is in v2-few.json, too"),
        ("check-base.json", "[]", "check-base.json: saw list"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept(made_results: Path, tmp_path: Path, file: str, text: str | None, said: str) -> None:
    path = made_results / file
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    with pytest.raises(join.JoinError, match=said):
        join.main(["keep", str(made_results), "2026-11-23-a"])
    assert not (tmp_path / "runs").exists()


def test_the_table_is_what_the_kept_runs_say() -> None:
    assert join.TABLE.read_text() == join.text_of(join.joined(join.RUNS))


def test_the_report_has_every_run_and_stage(capsys: pytest.CaptureFixture[str]) -> None:
    report.main()
    said = capsys.readouterr().out
    for run in json.loads(join.TABLE.read_text())["runs"]:
        assert f"### {run['name']}" in said
        for stage, one in run["stages"].items():
            assert f"\n| {stage}" in said and ("turns" in one or "lengths" in one or "1024:1" in one["decode"])
            for point in one["decode"].keys() & {"1024:1"}:
                assert f"| {stage} | {one['decode'][point]['step_ms']:.2f} |" in said
            for turn in (turn for turns in one.get("turns", {}).values() for turn in turns):
                again = turn["prompt"] - turn["cached"]
                assert f"| {stage} | {turn['prompt']} | {turn['cached']} | {again} |" in said
    assert "| v2-vocab | 10.93 | 9.3 % |" in said and "| v2-draft | 11.59 | 3.9 % |" in said


PERFORMANCE = (PROJECT / "docs/performance.md").read_text(encoding="utf-8")


def tables(text: str, head: str) -> list[dict[str, list[str]]]:
    """Tables whose head begins like this: a row's name, without what stands behind a colon -> its other cells."""
    found, rows = [], None
    for line in text.splitlines():
        name, *cells = (cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|"))
        if not cells:
            rows = None
        elif rows is None:
            rows = {}
            found += [rows] if line.startswith(head) else []
        elif name != "---":
            rows[name.partition(":")[0]] = cells
    return found


def test_the_document_s_tables_are_what_was_measured() -> None:
    found = json.loads(join.TABLE.read_text())
    [*_, chain] = (
        {name: run["stages"][name] for name in stages.CHAIN}
        for run in found["runs"]
        if run["routing"] == "uniform" and run["stages"].keys() >= set(stages.CHAIN)
    )

    def decode(measured: dict[str, Any], key: str, places: int) -> dict[str, list[str]]:
        points = [f"{context}:{batch}" for context in stages.CONTEXTS for batch in stages.BATCHES]
        return {name: [f"{one['decode'][p][key]:.{places}f}" for p in points] for name, one in measured.items()}

    [shared] = [run["stages"] for run in found["runs"] if run["routing"] == "shared"]
    beside, fused = stages_of(found, "2026-11-27-b-v3"), stages_of(found, "2026-11-27-f-v3-fused")
    v3 = {"v2-tq": beside["v2-tq"], "v3 without": beside["v3"], "v3": fused["v3"]}
    ratios = [
        a["step_ms"] / b["step_ms"]
        for a, b in zip(v3["v2-tq"]["decode"].values(), v3["v3"]["decode"].values(), strict=True)
    ]
    rows = decode(v3, "step_ms", 2)
    told = {
        "v2-tq": rows["v2-tq"],
        "v3 without the mod's choice of kernel": rows["v3 without"],
        "**v3**": rows["v3"],
        "times as fast as v2-tq": [f"{ratio:.3f}" for ratio in ratios],
    }
    assert tables(PERFORMANCE, "| ms a step |") == [decode(chain, "step_ms", 2), decode(shared, "step_ms", 2), told]
    assert tables(PERFORMANCE, "| tok/s, all sequences |") == [decode(chain, "tokens_per_s", 0)]
    first: dict[str, list[str]] = {}
    for name, one in chain.items():
        seen = [one["first_token_s"].get(p) for p in ("1024:1", "1024:8", "1024:16", "32768:1", "131072:1")]
        first[name] = [f"{statistics.median(times):.2f}" if times else "" for times in seen]
    assert tables(PERFORMANCE, "| | 1K x 1 |") == [first]
    titles = {"1024:1": "1K x 1", "1024:16": "1K x 16", "131072:1": "128K x 1"}

    def parts(measured: dict[str, Any], points: Iterable[str]) -> dict[str, list[str]]:
        told = {}
        for point, (name, one) in itertools.product(points, measured.items()):
            times = [one["parts_us"][point][part] for part in buckets.PARTS if part != "other"]
            told[f"{name}, {titles[point]}"] = [f"{time:.0f}" if time else "" for time in times]
        return told

    assert tables(PERFORMANCE, "| | attention |") == [parts(chain, titles)]
    assert tables(PERFORMANCE, "| microseconds a step |") == [parts(v3, ("1024:1", "1024:16"))]


def stages_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(run["stages"] for run in found["runs"] if run["name"] == name)


def test_the_document_s_kinds_of_cache_are_what_was_measured() -> None:
    found = json.loads(join.TABLE.read_text())
    first, again = (stages_of(found, f"2026-11-27-{name}") for name in ("d-peers", "e-peers-again"))
    rows = [
        line.replace("*", "").removeprefix("| ").removesuffix(" |").split(" | ")
        for line in PERFORMANCE.partition("tokens in 57 GiB")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    names = ("v2", "v2-tq", "v2-triton", "v2-fp8", "v2-int8", "v2-int4")
    for row, name in zip(rows, names, strict=True):
        one = (first | {key: value for key, value in again.items() if key not in first})[f"{name}-peers"]
        for place, point in enumerate(("1024:1", "131072:1", "131072:16"), start=3):
            ms = one["decode"][point]["step_ms"]
            assert row[place] in (f"{ms:.2f}", f"{ms:.1f}", f"{ms:.0f}"), (row, name, ms)
        assert row[6] == f"{one['parts_us']['131072:1']['attention']:,.0f}", (row, name)


def test_the_document_s_draft_lengths_are_the_report_s(capsys: pytest.CaptureFixture[str]) -> None:
    report.main()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 1 |", "| 8 |", "| 16 |"))]
    told = PERFORMANCE.partition("| users | drafted |")[2].partition("\n\n")[0].replace("*", "").splitlines()[2:]
    assert len(told) == 15 and told == said


def test_the_document_s_tables_of_bytes_are_the_report_s(capsys: pytest.CaptureFixture[str]) -> None:
    report.main()
    said = capsys.readouterr().out
    [chain] = tables(said, "| stage | GB a step, uniform | same")
    gb10 = {name: cells[:2] + cells[4:] for name, cells in chain.items()}  # without what the H200 did
    assert tables(PERFORMANCE, "| | GB a step, uniform |") == [gb10]
    [beside] = tables(PERFORMANCE, "| measured as |")
    counted = {name: cells[1:] for name, cells in beside.items()}  # without what it is
    assert tables(said, "| stage | GB a step, uniform | less") == [counted]


def test_the_document_s_ceilings_by_length_are_counted() -> None:
    counted = {}
    for one in CHAIN:
        ends = [
            [f"{report.ceiling(report.counted(one, context, same=same)):.1f}" for same in (False, True)]
            for context in stages.CONTEXTS
        ]
        counted[one.stage] = [even if even == same else f"{even} - {same}" for even, same in ends]
    assert tables(PERFORMANCE, "| tok/s at 273 GB/s, at most |") == [counted]


def test_the_readme_s_figures_are_those_of_the_data() -> None:
    said = " ".join((PROJECT / "README.md").read_text(encoding="utf-8").split())
    chain = join.latest(json.loads(join.TABLE.read_text()), "uniform")
    base, last = (chain[name]["decode"]["1024:1"]["tokens_per_s"] for name in ("base", "v2-tq"))
    assert f"v2-tq {last / base:.2f} times base ([speeds]" in said

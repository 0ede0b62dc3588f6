"""`invoke plan` as a person runs it, on the model that is generated here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkout_here import CheckoutHere

from sparkpin.cli.machine import planned_machine, read_size
from sparkpin.core.errors import InputError
from sparkpin.host.machine import read_host
from sparkpin.memory.inputs import has_wide_state
from sparkpin.memory.plan import SPARK_FREE, SPARK_TOTAL
from sparkpin.pins.manifests import load_stack


@pytest.fixture
def copy(tmp_path: Path) -> CheckoutHere:
    return CheckoutHere.make(tmp_path / "copy")


def test_plans_of_two_stages(copy: CheckoutHere) -> None:
    text = copy.done("plan", "--memory", "32GB", COLUMNS="80")
    tokens = "547,693" if has_wide_state() else "958,464"  # as vLLM logged on CPUs with AVX512-BF16 and without
    assert f"CPU KV cache size: {tokens} tokens, Maximum concurrency for 2,048 tokens per request" in text
    base = json.loads(copy.done("plan", "--stage", "base", "--memory", "32GB", "--json"))
    assert (base["stage"], base["fits"], base["pool_line"]["bytes"]) == ("base", True, 1 << 30)
    kinds = {row["kind"]: row["tensors"] for row in base["weights"]}
    assert kinds["INT4 experts"] == 144
    assert "FP8 layers" not in kinds


def test_what_does_not_fit_fails_only_when_asked(copy: CheckoutHere) -> None:
    for memory, options, code in (("1GB", (), 0), ("1GB", ("--exit-code",), 1), ("32GB", ("--exit-code",), 0)):
        assert copy.invoke("plan", "--memory", memory, *options).returncode == code


def test_settings_are_told_with_the_file_that_has_them(copy: CheckoutHere) -> None:
    text = copy.done("plan", "--memory", "32GB")
    assert "VLLM_CPU_KVCACHE_SPACE=1 of pins/stacks/cpu.yaml" in text
    command = "    --tool-call-parser qwen3_coder"
    copy.replace("recipes/scripted-tiny.yaml", command, command + " --frobnicate 3")
    text = copy.done("plan", "--memory", "32GB")
    assert "--frobnicate 3" in text
    copy.replace("stages/v2-tq.yaml", "turboquant_4bit_nc", "turboquant_5bit")
    wrong = copy.invoke("plan", "--memory", "32GB").stderr
    assert "stages/v2-tq.yaml: --kv-cache-dtype" in wrong and "turboquant_5bit" in wrong


def test_what_a_step_reads_and_the_speed_that_this_allows(copy: CheckoutHere) -> None:
    """Of the generated model on a Spark: INT4 experts of 4 layers x 3 x 128 x 128, four of them, two active."""
    published = copy.folder / "pins/published.yaml"
    figure = (
        "{recipe: scripted-tiny-spark, stage: base, tokens_per_second: 3, date: '2026', says: a, source: https://b}"
    )
    published.write_text(f"accepted: 0.5\nspeeds: [{figure}]\n")
    arguments = ("plan", "--recipe", "scripted-tiny-spark", "--memory", "128GB")
    decode = json.loads(copy.done(*arguments, "--json"))["decode"]
    found = {read["what"]: read for read in decode["reads"]}
    assert found["INT4 experts"]["size"] == 4 * 3 * 128 * 128 * 33 / 64 == 101_376
    assert (found["INT4 experts"]["times"], found["LM head"]["times"], decode["drafted"]) == (3.5, 3, 2)
    assert found["LM head"]["size"] == 1024 * 128 + 2 * (1024 + 128)
    assert decode["ceilings"]["1000"] == pytest.approx(2 * 273e9 / decode["step_bytes"]) and decode["published"] == []
    base = json.loads(copy.done(*arguments, "--stage", "base", "--bandwidth", "100", "--json"))["decode"]
    assert base["ceilings"]["1000"] == pytest.approx(100e9 / base["step_bytes"])
    assert base["published"] == [], "those are of a Spark"
    spark = json.loads(copy.done(*arguments, "--stage", "base", "--json"))["decode"]
    assert [one["tokens_per_second"] for one in spark["published"]] == [3]
    assert "3 tokens/s" in copy.done(*arguments, "--stage", "base")
    pair = json.loads(copy.done(*arguments, "--nodes", "2", "--json"))
    assert pair["settings"]["ranks"] == 2
    of_each = pair["decode"]["step_bytes"]
    assert 0.5 * decode["step_bytes"] < of_each < decode["step_bytes"], "norms and routers are on both"
    cpu = json.loads(copy.done("plan", "--memory", "32GB", "--json"))["decode"]
    assert cpu["ceilings"]["1000"] is cpu["bandwidth"] is None, "nobody stated this machine's"


def test_a_plan_for_fewer_machines_than_the_recipe_has(copy: CheckoutHere) -> None:
    plan = json.loads(copy.done("plan", "--recipe", "scripted-pair", "--nodes", "1", "--json"))
    assert plan["settings"]["ranks"] == 1


def test_wrong_options_are_one_clear_error(copy: CheckoutHere) -> None:
    for arguments in (
        ("--memory", "much"),
        ("--memory", "8GB", "--free", "16GB"),
        ("--bandwidth", "fast"),
        ("--bandwidth", "0"),
        ("--nodes", "0"),
        ("--recipe", "qwen"),
    ):
        result = copy.invoke("plan", *arguments)
        assert (result.returncode, "Traceback" in result.stderr) == (2, False)
        assert arguments[-2].lstrip("-") in result.stderr and "next: " in result.stderr


def test_sizes() -> None:
    assert read_size("memory", "128GB") == 128 * 10**9
    assert read_size("memory", "119.25 GiB") == 477 * 2**28


@pytest.mark.parametrize("text", ["", "128", "0GB", "-1GB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(InputError):
        read_size("free", text)


def test_the_machine(project: Path) -> None:
    """This one, if the stack is for it; for a Spark's stack elsewhere a Spark as users report it."""
    cpu = load_stack(project, "cpu")
    spark = cpu.model_copy(update={"platform": "linux/arm64"})
    here, there = (cpu, spark) if read_host().arch == "x86_64" else (spark, cpu)
    measured = planned_machine(here, "", "")
    assert (measured.total, measured.how) == (read_host().memory_total, "measured")
    assert 0 < measured.free <= measured.total
    given = planned_machine(here, "", "1GiB")
    assert (given.free, given.how) == (1 << 30, "measured")
    with pytest.raises(InputError, match="--free"):
        planned_machine(here, "", "1024TiB")
    assert (planned_machine(here, "8GiB", "").total, planned_machine(here, "8GiB", "7GiB").free) == (8 << 30, 7 << 30)
    if there is spark:
        planned = planned_machine(spark, "", "")
        assert (planned.total, planned.free, planned.how) == (SPARK_TOTAL, SPARK_FREE, "estimate")


@pytest.mark.parametrize(("flags", "wide"), [("avx512f avx512_bf16 amx_tile", True), ("sse2 avx512f", False)])
def test_the_flag_of_the_cpu_that_widens_the_state(tmp_path: Path, flags: str, wide: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    assert has_wide_state(tmp_path / "cpuinfo") == wide

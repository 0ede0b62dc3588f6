"""Tables of ../notes/performance.md from data/table.json: PYTHONPATH=src python benchmarks/stage_table/report.py"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterable
from typing import Any

from buckets import PARTS
from figures import CHAIN, Figure, decode_of
from join import TABLE, latest
from shapes import GROUP, SIZES

from sparkpin.memory.decode import DecodeStep
from stages import BATCHES, CONTEXTS, STAGES

GB10 = 273e9
ACCEPTED = 0.79
LAYERS = SIZES.attention + SIZES.linear
EXPERT_BYTES = 3 * SIZES.hidden * SIZES.expert_width * (0.5 + 2 / GROUP)
BESIDE = ("1024:1", "1024:16", "131072:1")
V2 = next(figure for figure in CHAIN if figure.stage == "v2")
NAMES = {1024: "1K", 32768: "32K", 131072: "128K"}


def candidates() -> list[Figure]:
    """What v2 could gain by fewer bytes, each off by default. Nobody has published a figure."""
    listed = ("--additional-config", json.dumps(STAGES["v2-vocab"].more["additional_config"]))
    states = ("--mamba-ssm-cache-dtype", str(STAGES["v2-state"].more["mamba_ssm_cache_dtype"]))
    return [
        dataclasses.replace(V2, stage="v2-vocab", flags=(*V2.flags, *listed)),
        dataclasses.replace(V2, stage="v2-draft", fp8_draft=True),
        dataclasses.replace(V2, stage="v2-state", flags=(*V2.flags, *states)),
    ]


def counted(figure: Figure, context: int, *, same: bool) -> DecodeStep:
    return decode_of(figure).step(context, same_experts=same)


def ceiling(step: DecodeStep) -> float:
    return step.ceiling(GB10, ACCEPTED)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    names = list(head)
    for row in (names, ["---"] * len(names), *rows):
        print("| " + " | ".join(row) + " |")
    print()


def decode(stages: dict[str, Any]) -> None:
    points = measured(stages, "decode")
    if not points:
        return
    names = [f"{NAMES[int(c)]} x {b}" for c, b in (point.split(":") for point in points)]
    for title, cell in (
        ("ms a step, medians", lambda one: f"{one['step_ms']:.2f}"),
        ("largest distance of a window from the median, %", spread),
        ("tok/s, all sequences", lambda one: f"{one['tokens_per_s']:.0f}"),
    ):
        table(
            [title, *names],
            (
                [name, *(cell(one["decode"][p]) if p in one["decode"] else "" for p in points)]
                for name, one in stages.items()
            ),
        )


def measured(stages: dict[str, Any], what: str) -> list[str]:
    """Points, as `1024:1`, that any of these stages has."""
    points = [f"{context}:{batch}" for context in CONTEXTS for batch in BATCHES]
    return [point for point in points if any(point in one.get(what, {}) for one in stages.values())]


def spread(one: dict[str, Any]) -> str:
    return f"{max(abs(w - one['step_ms']) for w in one['windows_ms']) / one['step_ms'] * 100:.1f}"


def parts(stages: dict[str, Any]) -> None:
    for point in measured(stages, "parts_us"):
        context, batch = point.split(":")
        rows = ((name, one["parts_us"][point]) for name, one in stages.items() if point in one.get("parts_us", {}))
        table(
            [f"microseconds a step, {NAMES[int(context)]} x {batch}", *PARTS],
            ([name, *(f"{times[part]:.0f}" for part in PARTS)] for name, times in rows),
        )


def routing(stages: dict[str, Any]) -> None:
    points = measured(stages, "routing")
    if not points:
        return
    reached = {
        name: {point: next(iter(one["routing"][point].values()))["experts"] for point in one.get("routing", {})}
        for name, one in stages.items()
    }
    table(
        ["experts of 256 that a step reaches", *points],
        ([name, *(f"{found[p]:.1f}" if p in found else "" for p in points)] for name, found in reached.items()),
    )


def first_tokens(stages: dict[str, Any]) -> None:
    points = measured(stages, "first_token_s")
    if not points:
        return
    rows = (
        [name, *(" ".join(f"{t:.2f}" for t in one.get("first_token_s", {}).get(point, [])) for point in points)]
        for name, one in stages.items()
    )
    names = (f"{NAMES[int(c)]} x {b}" for c, b in (point.split(":") for point in points))
    table(["first token of the last prompt, s", *names], rows)


def turns(stages: dict[str, Any]) -> None:
    """Of a conversation: what each prompt found in the prefix cache, and when its first token came."""
    rows = [
        [
            name,
            str(one["prompt"]),
            str(one["cached"]),
            str(one["prompt"] - one["cached"]),
            f"{one['first_token_s']:.2f}",
        ]
        for name, found in stages.items()
        for conversation in found.get("turns", {}).values()
        for one in conversation
    ]
    if rows:
        table(["turns of a conversation", "prompt", "cached", "read again", "first token, s"], rows)


def lengths(stages: dict[str, Any]) -> None:
    """By number of drafted tokens: ms a step, and tok/s of all sequences at each chance, which is of the step measured
    and of the tokens that chance gives (what was seen in 64 steps varies)."""
    for name, one in stages.items():
        found = {(row["batch"], row["drafted"], row["chance"]): row["step_ms"] for row in one.get("lengths", ())}
        chances = sorted({chance for _, drafted, chance in found if drafted})
        rows = []
        for batch, drafted in sorted({key[:2] for key in found}):
            steps = [found[batch, drafted, chance] for chance in (chances if drafted else (0.0,))]
            speeds = (
                batch * sum(chance**at for at in range(drafted + 1)) / statistics.median(steps) * 1e3
                for chance in chances
            )
            rows.append([str(batch), str(drafted), f"{statistics.median(steps):.2f}", *(f"{s:.0f}" for s in speeds)])
        if rows:
            table([f"{name}: users", "drafted", "ms a step", *(f"tok/s at {c:.0%}" for c in chances)], rows)


def experts(stages: dict[str, Any]) -> None:
    """What the kernel of INT4 experts reads, of the experts that were counted, and how fast."""
    rows = []
    for name, one in stages.items():
        for point, time in one.get("marlin_us", {}).items():
            if point not in one.get("routing", {}):  # is asked at 1K alone
                continue
            reached = next(iter(one["routing"][point].values()))["experts"]
            size = reached * LAYERS * EXPERT_BYTES
            rows.append([name, point, f"{reached:.1f}", f"{size / 1e9:.2f}", f"{time:.0f}", f"{size / time / 1e6:.2f}"])
    table(["INT4 experts", "point", "reached of 256", "GB a step", "microseconds", "TB/s"], rows)


def on_the_gpu(stages: dict[str, Any], name: str, read: DecodeStep) -> tuple[str, str]:
    if name not in stages:
        return "-", "-"
    ms = stages[name]["decode"]["1024:1"]["step_ms"]
    return f"{ms:.2f}", f"{read.bytes / ms / 1e6:.0f}"


def on_gb10(uniform: dict[str, Any]) -> None:
    rows = []
    for figure in CHAIN:
        even, same = counted(figure, 1024, same=False), counted(figure, 1024, same=True)
        row = [figure.stage, f"{even.bytes / 1e9:.2f}", f"{same.bytes / 1e9:.2f}"]
        row += [*on_the_gpu(uniform, figure.stage, even), f"{ceiling(even):.1f}", f"{ceiling(same):.1f}"]
        speed = figure.tokens
        rows.append([*row, *([f"{speed}", f"{speed / ceiling(even) * 100:.0f} %"] if speed else ["-", "-"])])
    table(
        ["stage", "GB a step, uniform", "same experts", "ms on the H200, uniform", "GB/s then",
         "tok/s at 273 GB/s, uniform", "same experts", "published", "of uniform"],
        rows,
    )  # fmt: skip


def side_by_side(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Stages of the last call that measured both v2 and what is off by default: calls differ by half a percent."""
    names = {figure.stage for figure in candidates()}
    found = [run["stages"] for run in runs if run["routing"] == "uniform" and "v2" in run["stages"]]
    return next((stages for stages in reversed(found) if names & set(stages)), {})


def beside_v2(stages: dict[str, Any]) -> None:
    """Bytes and ceilings of what is off by default, and what was measured of it."""
    rows = []
    whole = counted(V2, 1024, same=False)
    for figure in (V2, *candidates()):
        even, same = counted(figure, 1024, same=False), counted(figure, 1024, same=True)
        less = f"{(1 - even.bytes / whole.bytes) * 100:.1f} %" if figure is not V2 else ""
        row = [figure.stage, f"{even.bytes / 1e9:.2f}", less]
        row += [f"{same.bytes / 1e9:.2f}", f"{ceiling(even):.1f}"]
        times = stages.get(figure.stage, {}).get("decode", {})
        rows.append([*row, *(f"{times[point]['step_ms']:.2f}" if point in times else "" for point in BESIDE)])
    table(
        ["stage", "GB a step, uniform", "less", "same experts", "tok/s at 273 GB/s, same acceptance", "ms, 1K x 1",
         "1K x 16", "128K x 1"],
        rows,
    )  # fmt: skip


def main() -> None:
    found = json.loads(TABLE.read_text())
    for run in found["runs"]:
        print(f"### {run['name']}: {run['routing']} routing, vLLM {run['vllm']}, torch {run['torch']}, {run['gpu']}\n")
        stages = run["stages"]
        decode(stages)
        parts(stages)
        routing(stages)
        first_tokens(stages)
        turns(stages)
        lengths(stages)
        if "checks" in run:
            table(
                ["checks", "right", "tokens", "same tokens as the stage before"],
                (
                    [
                        name,
                        f"{one['right']} of {one['of']}",
                        str(one["tokens"]),
                        {True: "all", False: "not all"}.get(one.get("same_as_before"), "-"),
                    ]
                    for name, one in run["checks"].items()
                ),
            )
    uniform = latest(found, "uniform")
    print("### all runs\n")
    experts(uniform)
    on_gb10(uniform)
    beside_v2(side_by_side(found["runs"]))
    table(
        ["read in a step of v2, 1K, uniform", "MB", "times", "GB a step"],
        (
            [read.what, f"{read.size / 1e6:.1f}", f"{read.times:.1f}", f"{read.bytes / 1e9:.2f}"]
            for read in counted(V2, 1024, same=False).reads
        ),
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it takes none: an argument is an error
    main()

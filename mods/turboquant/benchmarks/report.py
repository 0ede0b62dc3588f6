"""The README's tables from results, and what tuned.json should say. usage: python report.py h200.json

Needs nothing but Python. Rows are told apart by their keys, as run.py and prefill.py write them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
WANTED = 0.8
"""Of bfloat16's speed, for prefill."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 else str(count)


def speeds(rows: Sequence[Row]) -> str:
    """Microseconds of decode, ours / bfloat16's, for 1 to 4 query tokens."""
    cells: dict[tuple[int, int], dict[int, Row]] = {}
    for row in rows:
        if "bf16_us" in row and "batch" in row:
            cells.setdefault((row["batch"], row["context"]), {})[row["queries"]] = row
    head = ["tokens", "sequences", "1 query token", *map(str, range(2, 5)), "GB/s"]
    lines = []
    for (batch, context), by_queries in cells.items():
        one = by_queries[1]
        times = [f"{r['us']:.0f} / {r['bf16_us']:.0f} = {r['bf16_us'] / r['us']:.2f}" for r in by_queries.values()]
        read = [f"{one[bytes] / one[us] / 1e3:.0f}" for bytes, us in (("bytes", "us"), ("bf16_bytes", "bf16_us"))]
        lines.append([tokens(context), batch, *times, " / ".join(read)])
    return table(head, lines)


def others(rows: Sequence[Row]) -> str:
    """Formats side by side, few multiprocessors, stores."""
    by_format: dict[str, list[str]] = {}
    for row in rows:
        if "format" in row and "bf16_us" not in row:
            by_format.setdefault(row["format"], []).append(f"{row['us']:.0f}")
    lines = [f"{name} {', '.join(times)}" for name, times in by_format.items()]
    lines += [f"read {row['read']:.0f} GB/s" for row in rows if "read" in row]
    lines += [
        f"{row['check']}: worst error of {row['cases']} cases {row['worst']:.4f}" for row in rows if "check" in row
    ]
    few = [f"{row['bytes'] / row['us'] / 1e3:.0f}" for row in rows if "processors" in row]
    lines += [f"with few multiprocessors {', '.join(few)} GB/s"] if few else []
    lines += [f"store {row['store']}: {row['us']:.1f}" for row in rows if "store" in row]
    return "\n".join(lines)


def stock(rows: Sequence[Row]) -> str:
    """vLLM's own kernels: by context and query tokens, with each number of splits."""
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if "stock" in row and "ours_us" in row:
            found.setdefault((row["queries"], row["stock"]), []).append(row)
    lines = []
    for (queries, context), mine in found.items():
        times = ", ".join(f"{r['times']:.0f}" for r in mine)
        us = [f"{r['us']:.0f}" for r in mine]
        lines.append([tokens(context), queries, *us, f"{mine[0]['ours_us']:.1f}", times])
    return table(["tokens", "query tokens", "vLLM's, 32 splits", "128 splits", "ours", "times"], lines)


def by_size(rows: Sequence[Row]) -> dict[tuple[int, int], Row]:
    """(history, new tokens) -> the row of prefill."""
    return {(row["history"], row["new"]): row for row in rows if "new" in row}


def ways(row: Row) -> dict[str, float]:
    """Microseconds of the ways that tuned.json chooses from: parts with the longest rounds, few, joined."""
    rounds = [key for key in row if key.startswith("room_")]
    longest = max(rounds, key=lambda key: int(key.split("_")[1]))
    return {
        way: row[key] for way, key in (("parts", longest), ("few", "few_us"), ("joined", "joined_us")) if key in row
    }


def prefill(rows: Sequence[Row]) -> str:
    """Microseconds of a layer: each way, bfloat16 in pages, and the speed of the fastest way."""
    lines = []
    for (history, new), row in by_size(rows).items():
        each = ways(row)
        best = min(each, key=lambda way: each[way])
        times = [f"{each[way]:.0f}" if way in each else "" for way in ("parts", "few", "joined")]
        speed = row["paged_us"] / each[best]
        lines.append([tokens(history), new, *times, f"{row['paged_us']:.0f} / {row['bf16_us']:.0f}"])
        lines[-1] += [f"{speed:.2f}" + ("" if speed >= WANTED else " <"), best]
    return table(["history", "new", "in parts", "few", "joined", "bfloat16 paged / plain", "speed", "best"], lines)


def advice(rows: Sequence[Row]) -> str:
    """The `few` and `joined` with which prefill of all sizes together takes the least, in proportion to bfloat16."""
    sizes = by_size(rows)
    if not sizes:
        return "no prefill was measured"
    steps = [0, *sorted({new for _, new in sizes})]

    def cost(few: int, joined: int) -> float:
        total = 0.0
        for (_, new), row in sizes.items():
            way = "few" if new <= few else "joined" if new <= joined else "parts"
            each = ways(row)
            total += each[way] / row["paged_us"] if way in each else float("inf")
        return total / len(sizes)

    best = min((cost(few, joined), few, joined) for few in steps for joined in steps if few <= joined or not joined)
    return (
        f'for tuned.json: "few": {best[1]}, "joined": {best[2]}: {best[0]:.3f} of bfloat16\'s time; '
        f"16 and 0: {cost(16, 0):.3f}"
    )


def main() -> None:
    rows: list[Row] = json.loads(Path(sys.argv[1]).read_text())
    for part in (speeds, others, stock, prefill, advice):
        print(part(rows), end="\n\n")


if __name__ == "__main__":
    main()

"""The README's tables from results such as h200.json, and what tuned.json should say. Needs nothing but Python.

Rows are told apart by their keys, as run.py and prefill.py write them. To measure again on an H200, with PyTorch for
CUDA 13, its Triton and cuda-bindings, and what peers.py made of vLLM's wheel as PEERS, from this folder:

    export PYTHONPATH=..:../../modkit:PEERS
    python run.py bench BENCH.json && python prefill.py speed SPEED.json && python prefill.py stock STOCK.json
    python report.py BENCH.json SPEED.json STOCK.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

TUNED = Path(__file__).resolve().parents[1] / "sparkpin_turboquant/tuned.json"
Row = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    first, *others = ("| " + " | ".join(map(str, line)) + " |" for line in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])


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


def tuned() -> tuple[int, int]:
    """`few` and `joined` of tuned.json for SM90, the GPU of the README's tables."""
    [entry] = json.loads(TUNED.read_text())["tuned"]["90"]
    return entry["few"], entry["joined"]


def way_of(new: int, few: int, joined: int) -> str:
    return "few" if new <= few else "joined" if new <= joined else "parts"


def prefill(rows: Sequence[Row]) -> str:
    """Microseconds of a layer by the way that tuned.json takes, beside bfloat16's, as the README has them."""
    sizes, chosen = by_size(rows), tuned()
    histories = sorted({history for history, _ in sizes})
    head = ["new tokens"]
    for history in histories:
        head += [f"{tokens(history)}: ours / paged / plain", "speed"]
    lines = []
    for new in sorted({new for _, new in sizes}):
        lines.append([str(new)])
        for history in histories:
            row = sizes.get((history, new), {})
            ours = ways(row).get(way_of(new, *chosen)) if row else None
            times = f"{ours:.0f} / {row['paged_us']:.0f} / {row['bf16_us']:.0f}" if ours else ""
            lines[-1] += [times, f"{row['paged_us'] / ours:.2f}" if ours else ""]
    return table(head, lines)


def advice(rows: Sequence[Row]) -> str:
    """The `few` and `joined` with which prefill of all sizes together takes the least, in proportion to bfloat16."""
    sizes = by_size(rows)
    if not sizes:
        return "no prefill was measured"
    steps = [0, *sorted({new for _, new in sizes})]

    def cost(few: int, joined: int) -> float:
        total = 0.0
        for (_, new), row in sizes.items():
            way, each = way_of(new, few, joined), ways(row)
            total += each[way] / row["paged_us"] if way in each else float("inf")
        return total / len(sizes)

    best = min((cost(few, joined), few, joined) for few in steps for joined in steps if few <= joined or not joined)
    return (
        f'for tuned.json: "few": {best[1]}, "joined": {best[2]}: {best[0]:.3f} of bfloat16\'s time; '
        f"16 and 0: {cost(16, 0):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="RESULTS.json", nargs="+", type=Path, help="h200.json, or what scripts wrote")
    rows = [row for file in parser.parse_args().files for row in json.loads(file.read_text())]
    few, joined = tuned()
    for title, part in (
        ("Decode, microseconds, ours / bfloat16's, by query tokens (README)", speeds),
        ("Other measurements: microseconds, unless a unit is named", others),
        ("Beside vLLM's own kernels, microseconds", stock),
        (f"Prefill by the way that tuned.json takes: few {few}, joined {joined} (README)", prefill),
        ("What these results say of tuned.json", advice),
    ):
        print(f"{title}:\n\n{part(rows)}", end="\n\n")


if __name__ == "__main__":
    main()

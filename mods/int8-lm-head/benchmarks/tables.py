"""The README's tables, made of h200.json: what head.py and few_processors.py wrote, under these names.

    python mods/int8-lm-head/benchmarks/tables.py

A test holds the README against them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPARK_GBPS = 273
SPARK_PROCESSORS = 48
SHOWN = (1, 4, 8, 16, 32, 64, 96, 128, 136, 160, 192, 224, 256, 384, 512, 1024)


def moved(head: dict[str, Any], tokens: int, weight_bytes: int) -> int:
    """Bytes that have to pass between the GPU and its memory: weights and their scales, activations, float32 logits."""
    rows, columns = head["V"], head["K"]
    return rows * columns * weight_bytes + 2 * rows + tokens * (2 * columns + 4 * rows)


def table(head: dict[str, Any]) -> str:
    lines = [
        "| tokens | INT8, us | of read bandwidth | cuBLAS BF16, us | ratio | both to BF16 |",
        "|---|---|---|---|---|---|",
    ]
    for row in head["times_us"]:
        if row["tokens"] in SHOWN:
            took = row["int8"]
            weights = head["V"] * head["K"] / took / 1e3 / head["read_GBps"]
            lines.append(
                f"| {row['tokens']} | {took:.0f} | {weights:.2f} | {row['cublas']:.0f} | {row['cublas'] / took:.2f} "
                f"| {row['cublas'] / row['int8_bf16_logits']:.2f} |"
            )
    return "\n".join(lines)


def in_4_bits(head: dict[str, Any]) -> str:
    """Microseconds, and the weights' bytes in that time as a share of the read bandwidth."""
    lines = ["| tokens | cuBLAS BF16 | INT8 | 4 bits | INT8 / 4 bits |", "|---|---|---|---|---|"]
    for row in head["times_us"]:
        if row["tokens"] in (1, 3, 8, 16, 24, 48):
            cells = []
            for name, size in (("cublas", 2), ("int8", 1), ("int4", 0.5)):
                share = head["V"] * head["K"] * size / row[name] / 1e3 / head["read_GBps"]
                cells.append(f"{row[name]:.0f} ({share:.2f})")
            lines.append(f"| {row['tokens']} | {' | '.join(cells)} | {row['int8'] / row['int4']:.2f} |")
    return "\n".join(lines)


def in_float32(head: dict[str, Any]) -> str:
    """How much longer BF16 takes when its logits are made float32; and when float32 ones are copied, too."""
    lines = ["| tokens | BF16 to float32, us | ratio | INT8, copied, us | ratio |", "|---|---|---|---|---|"]
    for row in head["times_us"]:
        if row["tokens"] in SHOWN and row["tokens"] >= 16:
            wide, took, copied = row["cublas_float32"], row["int8"], row["int8_copied"]
            lines.append(f"| {row['tokens']} | {wide:.0f} | {wide / took:.2f} | {copied:.0f} | {wide / copied:.2f} |")
    return "\n".join(lines)


def prediction(head: dict[str, Any]) -> str:
    """What the same share of the bandwidth that the H200 gave would be on a Spark."""
    lines = ["| tokens | INT8, ms | BF16, ms | saved, ms |", "|---|---|---|---|"]
    for row in head["times_us"]:
        if row["tokens"] in (1, 3, 8, 16, 32, 48, 64):
            times = []
            for name, size in (("int8", 1), ("cublas", 2)):
                share = moved(head, row["tokens"], size) / row[name] / 1e3 / head["read_GBps"]
                times.append(moved(head, row["tokens"], size) / (SPARK_GBPS * min(share, 0.92)) / 1e6)
            lines.append(f"| {row['tokens']} | {times[0]:.1f} | {times[1]:.1f} | {times[1] - times[0]:.1f} |")
    return "\n".join(lines)


def processors(few: list[dict[str, Any]]) -> str:
    """A sentence's end: what one multiprocessor takes from memory, and how many times what a Spark's gives each."""
    each = sorted(row["GBps_each_as_sm80"] for row in few)
    low, high = (value / (SPARK_GBPS / SPARK_PROCESSORS) for value in (each[0], each[-1]))
    return f"{each[0]:.1f} to {each[-1]:.1f} GB/s each, {low:.1f} to {high:.1f} times what a Spark's memory gives"


def tables(measured: dict[str, Any]) -> list[str]:
    """In the README's order; the last is words."""
    head = measured["head"]
    return [
        in_4_bits(head),
        table(head),
        in_float32(head),
        prediction(head),
        processors(measured["few_processors"]),
    ]


if __name__ == "__main__":
    print(*tables(json.loads(Path(__file__).with_name("h200.json").read_text())), sep="\n\n")

"""The README's plot and tables from measured data: head.svg beside this file, and Markdown on the terminal.

    python mods/int8-lm-head/benchmarks/plot.py h200.json

h200.json is what head.py, few_processors.py and numerics.py wrote, under these names. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
SPARK_GBPS = 273
SPARK_PROCESSORS = 48
SHOWN = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 136, 160, 192, 224, 256, 384, 512, 1024)


def moved(head: dict[str, Any], tokens: int, weight_bytes: int) -> int:
    """Bytes that have to pass between the GPU and its memory: weights and their scales, activations, float32 logits."""
    rows, columns = head["V"], head["K"]
    return rows * columns * weight_bytes + 2 * rows + tokens * (2 * columns + 4 * rows)


def table(head: dict[str, Any]) -> str:
    lines = [
        "| tokens | INT8, us | of read bandwidth | cuBLAS BF16, us | ratio | both to BF16 | row loop, us | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in head["times_us"]:
        if row["tokens"] in SHOWN:
            took, looped = row["int8"], row.get("row_loop")
            weights = head["V"] * head["K"] / took / 1e3 / head["read_GBps"]
            lines.append(
                f"| {row['tokens']} | {took:.0f} | {weights:.2f} | {row['cublas']:.0f} | {row['cublas'] / took:.2f} "
                f"| {row['cublas'] / row['int8_bf16_logits']:.2f} "
                + (f"| {looped:.0f} | {looped / took:.1f} |" if looped else "| | |")
            )
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
    lines = ["| tile of tokens | GB/s | of what a Spark's memory gives each |", "|---|---|---|"]
    for row in few:
        each = row["GBps_each_as_sm80"]
        lines.append(f"| {row['block_b']} | {each:.1f} | {each / (SPARK_GBPS / SPARK_PROCESSORS):.1f} |")
    return "\n".join(lines)


def numbers(rows: list[dict[str, Any]]) -> str:
    lines = ["| outlier columns | hidden states | head | top-1 | top-20 | KL |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['outliers']} | {row['hidden']} | {row['head']} | {row['top1']:.4f} | {row['top20']:.4f} "
            f"| {row['kl']:.2e} |"
        )
    return "\n".join(lines)


def draw(head: dict[str, Any]) -> None:
    figure, (times, shares) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, label, style in (
        ("row_loop", "row loop", "C0o-"),
        ("cublas_float32", "cuBLAS BF16, made float32", "C1o:"),
        ("cublas", "cuBLAS BF16", "C1o-"),
        ("int8", "INT8", "C2o-"),
    ):
        rows = [row for row in head["times_us"] if name in row]
        times.plot([row["tokens"] for row in rows], [row[name] for row in rows], style, markersize=3, label=label)
    times.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", xticks=[1, 2, 4, 8, 16, 32, 64, 128, 512]
    )
    times.xaxis.set_major_formatter("{x:.0f}")
    times.set_xlim(0.9, 1200)
    times.legend(fontsize=7)
    for name, label, size, colour in (("cublas", "cuBLAS BF16", 2, "C1"), ("int8", "INT8", 1, "C2")):
        rows = [row for row in head["times_us"] if row["tokens"] <= 64]
        weights = head["V"] * head["K"] * size
        share = [weights / row[name] / 1e3 / head["read_GBps"] for row in rows]
        shares.plot([row["tokens"] for row in rows], share, marker="o", markersize=3, label=label, color=colour)
    shares.set(xlabel="tokens", ylabel="share of read bandwidth", ylim=(0, 1.05), xlim=(0, 66))
    shares.legend()
    figure.suptitle(f"LM head {head['V']} x {head['K']} on an {head['gpu']}", fontsize=10)
    figure.savefig(HERE / "head.svg", metadata={"Date": None})


def main() -> None:
    measured = json.loads((HERE / sys.argv[1]).read_text())
    matplotlib.rcParams["svg.hashsalt"] = "head"
    draw(measured["head"])
    for made in (
        table(measured["head"]),
        in_float32(measured["head"]),
        prediction(measured["head"]),
        processors(measured["few_processors"]),
        numbers(measured["numerics"]),
    ):
        print(made, end="\n\n")


if __name__ == "__main__":
    main()

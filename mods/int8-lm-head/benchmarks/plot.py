"""The README's plot and tables from measured data: head.svg beside this file, and Markdown on the terminal.

    python mods/int8-lm-head/benchmarks/plot.py h200.json

h200.json, in this folder, is what head.py, few_processors.py and numerics.py wrote, under these names. Needs
matplotlib.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tables import tables

HERE = Path(__file__).parent


def draw(head: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "head"
    from matplotlib import pyplot as plt

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="RESULTS.json", help="h200.json; a name is one beside this script")
    path = HERE / parser.parse_args().results
    if not path.is_file():
        parser.error(f"{path}: no such file; wanted results, such as h200.json")
    if find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed: pip install matplotlib")
    measured = json.loads(path.read_text())
    draw(measured["head"])
    for made in tables(measured):
        print(made, end="\n\n")


if __name__ == "__main__":
    main()

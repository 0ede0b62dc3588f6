"""Draw speed against bfloat16 from the benchmark's results. usage: python plot.py h200.json speed.svg"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot


def main() -> None:
    rows = [row for row in json.loads(Path(sys.argv[1]).read_text()) if "bf16_us" in row and row.get("batch")]
    matplotlib.rcParams["svg.hashsalt"] = "turboquant"  # else names differ each time
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for queries in (1, 2, 3, 4):
        mine = [row for row in rows if row["batch"] == 1 and row["queries"] == queries]
        ratios = [row["bf16_us"] / row["us"] for row in mine]
        axes.plot([row["context"] for row in mine], ratios, marker="o", label=f"{queries} query tokens")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("cached tokens, one sequence")
    axes.set_ylabel("speed, bfloat16 = 1")
    axes.legend()
    figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()

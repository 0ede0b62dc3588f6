"""Draw speed against bfloat16 from the benchmark's results: python plot.py h200.json speed.svg. Needs matplotlib."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from report import read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", metavar="RESULTS.json", type=read, help="h200.json, or results.json of session.py")
    parser.add_argument("out", metavar="OUT.svg", type=Path)
    given = parser.parse_args()
    if find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed: pip install matplotlib")

    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [row for row in given.rows if "bf16_us" in row and row.get("batch")]
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
    figure.savefig(given.out, metadata={"Date": None})


if __name__ == "__main__":
    main()

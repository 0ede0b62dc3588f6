"""Draw the stage table: PYTHONPATH=src python benchmarks/stage_table/plot.py docs/performance.svg. Needs matplotlib."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from figures import CHAIN
from join import TABLE, latest
from report import ceiling, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", metavar="OUT.svg", type=Path)
    out = parser.parse_args().out
    if find_spec("matplotlib") is None:
        parser.error("matplotlib is not installed: pip install matplotlib")

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sparkpin"
    from matplotlib import pyplot

    found = json.loads(TABLE.read_text())
    names = [figure.stage for figure in CHAIN]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for i, (context, label) in enumerate((("1024", "1K"), ("131072", "128K"))):
        for stages, style, what in (
            (latest(found, "shared"), {"linestyle": ":", "alpha": 0.6}, "experts shared by all tokens"),
            (latest(found, "uniform"), {"marker": "o"}, "uniform routing"),
        ):
            point = f"{context}:1"
            speeds = [stages[n]["decode"][point]["tokens_per_s"] if n in stages else float("nan") for n in names]
            left.plot(names, speeds, color=f"C{i}", label=f"{label}, {what}", **style)
    left.set_title("H200, random weights, one sequence", fontsize=9)
    ends = [[ceiling(counted(one, 1024, same=same)) for one in CHAIN] for same in (True, False)]
    right.fill_between(names, *ends, alpha=0.3, label="up to: tokens share experts")
    right.plot(names, ends[1], marker="o", color="C0", label="273 GB/s, uniform routing")
    right.plot(names, [one.tokens for one in CHAIN], marker="s", color="black", label="published")
    right.set_title("GB10: computed from bytes, and published", fontsize=9)
    for axes in (left, right):
        axes.set_ylabel("tokens a second")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()

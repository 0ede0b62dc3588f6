"""How long `invoke inspect` takes, from the engine's layers and from an export of the image.

usage: .venv/bin/python benchmarks/inspect_image.py TAG [--runs 3]

Both in turn, in one run, as root; the times are medians, warm: the first round does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.host import image_files
from sparkpin.host.engine import Engine
from sparkpin.smoke.inspect.image import open_image
from sparkpin.smoke.inspect.rules import findings
from sparkpin.smoke.inspect.scan import ImageFacts, scan


def quiet(line: str) -> None:
    pass


def examined(engine: Engine, tag: str) -> ImageFacts:
    with open_image(Paths.from_env(), engine, tag, quiet) as opened:
        facts = scan(opened.files, quiet, opened.env)
    findings(facts, sm=121, platform=opened.platform)
    return facts


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    engine, layers = Engine.connect(), image_files.layer_folders
    if not layers(engine, options.tag):
        raise SystemExit("the engine's layers cannot be read here: run as root, with an engine on overlay2")
    times: dict[str, list[float]] = {"layers": [], "export": []}
    for _ in range(options.runs + 1):
        for way, taken in times.items():
            image_files.layer_folders = layers if way == "layers" else lambda engine, ref: ()  # type: ignore[assignment]
            taken.append(seconds(lambda: examined(engine, options.tag)))
    image_files.layer_folders = layers
    facts = examined(engine, options.tag)
    print(
        f"{options.tag}: {terminal.size(facts.size)}, {facts.files} files, "
        f"{len(facts.libraries)} libraries and programs"
    )
    medians = {way: statistics.median(taken[1:]) for way, taken in times.items()}
    for way, median in medians.items():
        print(f"{way:8} {median:6.1f} s  {facts.size / median / 1e6:8.0f} MB/s")
    print(f"export / layers: {medians['export'] / medians['layers']:.1f}")


if __name__ == "__main__":
    main()

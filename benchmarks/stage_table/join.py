"""Keep what a GPU machine's runs gave, and join all that was kept into data/table.json.

usage: PYTHONPATH=src python benchmarks/stage_table/join.py keep RESULTS NAME [NOTE]    RESULTS into data/runs/NAME
       PYTHONPATH=src python benchmarks/stage_table/join.py                             all of them into data/table.json

RESULTS is the folder that table.py wrote into: one a call. Of a profile's kernels (*.rows.gz, megabytes) the times by
part of the model are kept, and those of the INT4 experts' kernel. What was measured stays as it came.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

from buckets import Row, parts_of
from shapes import SIZES

from sparkpin.core.files import atomic_file, atomic_folder
from stages import CHECKED, STAGES

HERE = Path(__file__).resolve().parent
RUNS, TABLE = HERE / "data/runs", HERE / "data/table.json"
RUN = "run.json"
FACTS = ("date", "vllm", "torch", "gpu", "driver", "routing", "jobs")
"""What run.json must say; `note` and more may stand beside it."""

LAYERS = SIZES.attention + SIZES.linear
LEFT_OUT = ("took_s",)
POINT = re.compile(r"-(\d+)-(\d+)\.rows\.gz$")
SAME_KEY = ("few", "long")
"""Options of a job that change which points are measured, not what is."""


class JoinError(SystemExit):
    """What is wrong with a file, and what to do."""


def read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JoinError(f"{path}: {error}; expected a JSON file as table.py writes it") from error
    if not isinstance(value, dict):
        raise JoinError(f"{path}: got {type(value).__name__}, expected a JSON object as table.py writes it")
    return value


def text_of(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"


def facts(path: Path) -> dict[str, Any]:
    found = read(path)
    if missing := [key for key in FACTS if not found.get(key)]:
        raise JoinError(f"{path}: {missing[0]}: got nothing, expected {', '.join(FACTS)}; table.py writes this file")
    return found


def key_of(path: Path, found: dict[str, Any]) -> str:
    """`v2` for v2.json and v2-few.json; `v2-own`, another measurement, for v2-own.json."""
    stage = found.get("stage")
    if stage not in STAGES or not (path.stem == stage or path.stem.startswith(f"{stage}-")):
        raise JoinError(f"{path}: stage: got {stage!r}, expected the stage that the file is named after")
    option = path.stem[len(stage) + 1 :]
    return stage if option in ("", *SAME_KEY) else path.stem


def results(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """What was measured of each stage, in the order of `STAGES`."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name in (RUN, "times.json") or path.name.startswith("check-"):
            continue
        value = read(path)
        key = key_of(path, value)
        if key in found:
            raise JoinError(f"{path}: stage {key} is in {found[key][0].name}, too; keep one of them, or two runs")
        found[key] = path, value
    order = list(STAGES)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[1][1]["stage"]), item[0])))


def reduced(rows: list[Row]) -> tuple[dict[str, float], float]:
    """Microseconds a step: by part of the model, and of the kernel of INT4 experts alone."""
    parts = parts_of(rows, LAYERS)
    marlin = sum(row[2] for row in rows if "marlin_moe" in row[0] and row[3] == "execute_model")
    return {part: round(time, 2) for part, time in parts.items()}, round(marlin / parts["steps"], 2)


def with_parts(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """One stage's results, with the times of its profiles."""
    kept = {key: value for key, value in found.items() if key not in LEFT_OUT}
    parts, marlin, errors = {}, {}, {}
    for profile in sorted(path.parent.glob(f"{path.stem}-*.rows.gz")):
        match = POINT.search(profile.name)
        if match and profile.name == f"{path.stem}{match[0]}":  # v2-1024-1, not v2-tq-1024-1
            with gzip.open(profile, "rt") as file:
                rows = [row_of(row) for row in json.load(file)]
            point = f"{match[1]}:{match[2]}"
            try:
                parts[point], marlin[point] = reduced(rows)
            except ValueError as error:  # the other points are as good as before
                errors[f"profile {point}"] = str(error)
    if errors:
        kept["errors"] = kept.get("errors", {}) | errors
    return kept | ({"parts_us": parts, "marlin_us": marlin} if parts else {})


def row_of(row: list[Any]) -> Row:
    name, begin, duration, scope = row
    return str(name), float(begin), float(duration), str(scope)


def checks(folder: Path) -> dict[str, dict[str, Any]]:
    """Answers of the scripted model: how many were right, and whether they are, token by token, the stage before's."""
    found: dict[str, dict[str, Any]] = {}
    before: list[list[int]] | None = None
    for stage in CHECKED:
        path = folder / f"check-{stage}.json"
        if not path.exists():
            before = None
            continue
        one = read(path)
        found[stage] = {key: one[key] for key in ("ready_s", "right", "of")} | {"tokens": sum(map(len, one["ids"]))}
        if before is not None:
            found[stage]["same_as_before"] = one["ids"] == before
        before = one["ids"]
    return found


def keep(source: Path, name: str, note: str = "") -> Path:
    """`source` into runs/`name`, which must not be there yet."""
    target = RUNS / name
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}-[a-z0-9-]+", name):
        raise JoinError(f"{name}: expected a date and a word, such as 2026-11-23-side-by-side")
    if target.exists():
        raise JoinError(f"{target} is there: give the run another name, or remove that one")
    run = facts(source / RUN) | ({"note": note} if note else {})
    stages = {f"{path.stem}.json": with_parts(path, found) for path, found in results(source).values()}
    if not stages:
        raise JoinError(f"{source}: got no results of a stage, expected files such as v2.json; table.py writes them")
    files = {RUN: run, **stages, **{f"check-{stage}.json": one for stage, one in checks(source).items()}}
    with atomic_folder(target) as folder:
        for file, value in files.items():
            (folder / file).write_text(text_of(value))
    return target


def joined(runs: Path) -> dict[str, Any]:
    """All that was kept, runs in the order of their names."""
    found = []
    for folder in sorted(path for path in runs.iterdir() if path.is_dir()):
        stages = {key: value for key, (_, value) in results(folder).items()}
        seen = {stage: path for stage in CHECKED if (path := folder / f"check-{stage}.json").exists()}
        checked = {stage: read(path) for stage, path in seen.items()}
        found.append(
            {"name": folder.name, **facts(folder / RUN), "stages": stages, **({"checks": checked} if checked else {})}
        )
    return {"runs": found}


def latest(table: dict[str, Any], routing: str) -> dict[str, dict[str, Any]]:
    """Stage -> what the last run with this routing measured, in the order of `STAGES`. Not what NAME@own or NAME@eager
    did, which was something else in the same run."""
    found = {
        key: one
        for run in table["runs"]
        if run["routing"] == routing
        for key, one in run["stages"].items()
        if key == one["stage"]
    }
    order = list(STAGES)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def main(arguments: list[str]) -> None:
    if not arguments:
        with atomic_file(TABLE) as file:
            file.write(text_of(joined(RUNS)).encode())
        print(TABLE)
    elif arguments[0] == "keep" and len(arguments) in (3, 4):
        print(keep(Path(arguments[1]), *arguments[2:]))
    else:
        raise JoinError(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

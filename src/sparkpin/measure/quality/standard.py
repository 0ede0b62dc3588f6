"""Standard tasks through lm-eval (EleutherAI's lm-evaluation-harness), against the served endpoint.

It lives in an environment of its own, made from the hashes of lm_eval/requirements.lock, in SPARKPIN_CACHE/lm-eval.
Only `fetch` uses the network; a run is offline, with the data that HF_HOME (or lm-eval/data) has.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparkpin.core.errors import InputError, NetworkError, SmokeError
from sparkpin.core.files import atomic_file, lock, require_space, sha256_file, write_json
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.measure.quality import watched

FOLDER = Path(__file__).parent / "lm_eval"
LOCK = FOLDER / "requirements.lock"
TASKS = FOLDER / "tasks"  # of our own: their data are there, too
READY = "sparkpin.json"
INSTALLED = 1_500_000_000  # bytes: 0.7 GB of packages, and uv's cache of them
HOURS = 12  # that lm-eval may take for the tasks of one release
SILENT = 1800.0  # seconds: one request may take 600, and a task's data some time to be read
NAME = re.compile(r"\w[\w.:-]*")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
NO_DATA = ("OfflineModeIsEnabled", "Couldn't find cache for", "Couldn't reach", "LocalEntryNotFound", "OfflineMode")
UNKNOWN = (
    "import difflib, json, sys; from lm_eval.tasks import TaskManager; tasks = TaskManager(include_path=sys.argv[1]); "
    "print(json.dumps({name: difflib.get_close_matches(name, tasks.all_tasks) for name in sys.argv[2:] "
    "if not tasks.match_tasks([name])}))"
)
FETCH_DATA = (
    "import sys; from lm_eval.tasks import TaskManager, get_task_dict; "
    "get_task_dict(sys.argv[2:], TaskManager(include_path=sys.argv[1]))"
)


@dataclass(frozen=True)
class StandardTasks:
    """What of lm-eval to ask."""

    tasks: tuple[str, ...]  # its names
    limit: int = 0  # questions of each, 0 for all
    chat: bool = False  # asked as chats, which tasks that compare log-probabilities cannot be


def seconds_of(hours: int) -> float:
    if hours < 1:
        raise InputError(f"--hours: saw {hours}, wanted 1 or more", next_step=f"--hours {HOURS}")
    return 3600.0 * hours


def wanted_of(names: str, *, limit: int, chat: bool, fetch: bool) -> StandardTasks | None:
    """names: as a person writes them, "arc_easy,gsm8k"."""
    tasks = tuple(filter(None, (name.strip() for name in names.split(","))))
    if not tasks and (fetch or chat or limit):
        raise InputError("--fetch, --chat and --limit are about --tasks", next_step="--tasks sparkpin_choices")
    for name in tasks:
        if not NAME.fullmatch(name):
            raise InputError(f"--tasks: saw {name!r}, wanted a name of lm-eval", next_step="--tasks arc_easy,gsm8k")
        if name.startswith("sparkpin_") and name not in own_tasks():
            wanted = f"{' or '.join(own_tasks())}, or a name of lm-eval"
            raise InputError(f"--tasks: saw {name!r}, wanted {wanted}", next_step=f"--tasks {','.join(own_tasks())}")
    return StandardTasks(tasks, limit, chat) if tasks else None


def own_tasks() -> list[str]:
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


@dataclass(frozen=True)
class Score:
    task: str
    metric: str
    samples: int
    value: float
    stderr: float | None


def environment(paths: Paths) -> Path:
    return paths.cache / "lm-eval" / sha256_file(LOCK)[0][:16]


def asked(wanted: StandardTasks) -> dict[str, Any]:
    """What decides the scores of a release, as JSON: the wish, the packages by their lock, the tasks of our own."""
    files = [LOCK, *sorted(TASKS.glob("*.*"))]
    return asdict(wanted) | {"files": {file.name: sha256_file(file)[0] for file in files}}


def child_env(paths: Paths, *, offline: bool) -> dict[str, str]:
    """HF_HOME and the like of the person who asks; nothing of our own environment of Python. offline: no proxies
    either, which would be asked for the server on 127.0.0.1.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env.setdefault("HF_HOME", str(paths.cache / "lm-eval/data"))
    if not offline:
        return env
    return {key: value for key, value in env.items() if not key.lower().endswith("_proxy")} | OFFLINE


def require_installed(paths: Paths, wanted: StandardTasks) -> Path:
    """lm-eval's own Python. InputError where it is not there."""
    folder = environment(paths)
    if not (folder / READY).is_file():
        others = ", ".join(name for name in wanted.tasks if name not in own_tasks())
        alone = f", and it alone knows whether it has {others}" if others else ""
        raise InputError(
            f"lm-eval is not installed in {folder}{alone}",
            next_step="the same command with --fetch (89 packages by their hashes, 0.7 GB, and the tasks' data)",
        )
    return folder / "bin/python"


def require_known(paths: Paths, wanted: StandardTasks) -> None:
    """InputError for a task that lm-eval does not have. It takes half a minute to tell; those of our own are known."""
    python, names = require_installed(paths, wanted), [name for name in wanted.tasks if name not in own_tasks()]
    if not names:
        return
    done = run_python(paths, UNKNOWN, names, offline=True)
    if done.returncode:
        raise SmokeError(
            f"lm-eval does not tell its tasks:\n{last(done.stderr, 3)}",
            next_step=f"rm -r {python.parents[1]}, then the same command with --fetch",
        )
    for name, near in json.loads(done.stdout.splitlines()[-1]).items():
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        listed = f"{environment(paths)}/bin/lm_eval ls tasks lists them; {' and '.join(own_tasks())} need no data"
        raise InputError(f"--tasks: lm-eval has no task {name!r}", next_step=f"{meant}{listed}")


def run_python(paths: Paths, program: str, names: Sequence[str], *, offline: bool) -> subprocess.CompletedProcess[str]:
    """A program for lm-eval's own Python. names: of tasks."""
    argv = [str(environment(paths) / "bin/python"), "-c", program, str(TASKS), *names]
    return subprocess.run(argv, cwd=TASKS, env=child_env(paths, offline=offline), capture_output=True, text=True)


def fetch(paths: Paths, wanted: StandardTasks, say: Say) -> None:
    """Install lm-eval by its lock, then let it fetch what the tasks need. Network."""
    folder = environment(paths)
    with lock(folder.parent / ".lock", on_wait=lambda: say("waiting for another run that installs lm-eval")):
        if not (folder / READY).is_file():
            require_space(folder.parent, INSTALLED, "lm-eval and what it needs", "SPARKPIN_CACHE")
            say(f"installing lm-eval in {folder}")
            run_uv("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
            python = str(folder / "bin/python")
            run_uv("pip", "install", "--quiet", "--python", python, "--require-hashes", "-r", str(LOCK))
            with atomic_file(folder / READY) as file:  # an environment without it is half-made
                file.write(b"{}\n")
    say(f"fetching the data of {', '.join(wanted.tasks)}")
    done = run_python(paths, FETCH_DATA, wanted.tasks, offline=False)
    if done.returncode:
        require_known(paths, wanted)
        raise NetworkError(
            f"the data of {', '.join(wanted.tasks)} could not be fetched:\n{last(done.stderr, 3)}",
            next_step="fetch where the Hub is in reach, copy its HF_HOME here, set HF_HOME, leave out --fetch",
        )


def run_uv(*words: str) -> None:
    # uv lies beside the Python that runs this, whether or not its environment was activated.
    done = subprocess.run([str(Path(sys.executable).parent / "uv"), *words], capture_output=True, text=True)
    if done.returncode:
        raise NetworkError(f"uv {words[0]} failed:\n{last(done.stderr)}", next_step="the same command again")


class Served(NamedTuple):
    port: int
    model: str
    tokenizer: Path  # a folder with the model's
    length: int  # tokens that a request may have


def scores(paths: Paths, wanted: StandardTasks, served: Served, *, limit: float, say: Say) -> tuple[Score, ...]:
    """Run the tasks, offline. limit: seconds that all of it may take."""
    python = require_installed(paths, wanted)
    say(f"lm-eval: {', '.join(wanted.tasks)}")
    with tempfile.TemporaryDirectory(prefix="lm-eval-", dir=paths.work) as out:
        argv = [str(python), "-m", "lm_eval", *arguments(wanted, served), "--output_path", out]
        env = child_env(paths, offline=True)

        def told(line: str) -> None:
            os.utime(out)  # in use: `prune` goes by it, and lm-eval writes only at its end
            say(line)

        try:
            done = watched.run(argv, cwd=TASKS, env=env, limit=limit, silent=SILENT, say=told)
        except watched.Overdue as why:
            raise SmokeError(
                f"lm-eval was ended: {why}; {', '.join(wanted.tasks)}\n{last(why.written, 3)}",
                next_step="the same command with --limit N, which asks fewer questions, or with more --hours",
            ) from None
        found = sorted(Path(out).rglob("results_*.json"))
        if done.returncode or not found:
            raise_for(done.stdout, wanted)
        return read_scores(json.loads(found[-1].read_text(encoding="utf-8")))


def arguments(wanted: StandardTasks, served: Served) -> list[str]:
    kind, path = ("local-chat-completions", "chat/completions") if wanted.chat else ("local-completions", "completions")
    values = {
        "model": served.model,
        "base_url": f"http://127.0.0.1:{served.port}/v1/{path}",
        "num_concurrent": 1,
        "max_retries": 1,
        "tokenizer": served.tokenizer,
        "max_length": served.length,
    }
    return [
        *("--model", kind),
        *("--model_args", ",".join(f"{key}={value}" for key, value in values.items())),
        *("--tasks", ",".join(wanted.tasks)),
        *("--include_path", str(TASKS)),
        *(["--apply_chat_template"] if wanted.chat else []),
        *(["--limit", str(wanted.limit)] if wanted.limit else []),
    ]


def raise_for(text: str, wanted: StandardTasks) -> None:
    """The error for a run without a result."""
    names = ", ".join(wanted.tasks)
    if any(sign in text for sign in NO_DATA):
        raise InputError(
            f"the data of {names} are not at hand, and a run is offline:\n{last(text, 1)}",
            next_step="the same command with --fetch where the Hub is in reach; else copy an HF_HOME that has them",
        )
    if "not supported for chat completions" in text:
        raise InputError(f"{names} compares log-probabilities, which chats do not give", next_step="leave out --chat")
    raise SmokeError(f"lm-eval gave no result for {names}:\n{last(text)}", next_step="read what lm-eval says above")


def last(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def read_scores(value: Mapping[str, Any]) -> tuple[Score, ...]:
    """Of lm-eval's result file: `results` has "metric,filter" -> number, and "metric_stderr,filter"."""
    found = []
    for task, results in value["results"].items():
        samples = int(value.get("n-samples", {}).get(task, {}).get("effective", 0))
        for key, number in results.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(number, int | float):
                continue
            error = results.get(f"{metric}_stderr,{chosen}")
            name = metric if chosen == "none" else key
            found.append(Score(task, name, samples, float(number), error if isinstance(error, float) else None))
    return tuple(found)


def keep(path: Path, found: tuple[Score, ...]) -> None:
    write_json(path, [asdict(score) for score in found])


def known(path: Path) -> tuple[Score, ...] | None:
    try:
        return tuple(Score(**row) for row in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None

"""Send the hostile and odd requests of tests/support to real vLLM servers with the scripted model; write what they do.

usage: python hostile.py RESULTS [--cpu MODEL] [--seconds N] [--only PATTERN] [JOB...]
       python hostile.py FILE.json --join RESULTS/results.jsonl...    # one table of several calls, the last word counts

Runs in the folder that prepare.py made, as root, with `site`, `src`, `tests/support`, `mods/modkit` and `mods/guard` on
PYTHONPATH (README.md).
Each job is a process with a server and cores of its own. `proxy` jobs ask a server with mods/guard through our proxy:
all requests by its own table, those at other paths once more with these opened, then proxy_trials. `bare` jobs send a
server without it what it refuses, and start it again when that has ended it. Beside each request, and after it, a
control is asked. RESULTS/results.jsonl has a line for each. --cpu: in an image of the stack cpu, with its checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import proxy_trials
from request_trials import CHAT, HELLO, MODEL, TRIALS, Trial, attack, refused_before
from run import COMMON, COMPILED, GRAPHS, MTP, OFF, cache

from benchmarks.scripted_tiny.scripts import CHAT as ANSWER
from sparkpin.releases import inside
from sparkpin.releases.postmortem import first_error, relevant
from sparkpin.serve import proxy
from sparkpin.serve.address import Address, Limits
from sparkpin.serve.launch import SOCKET, SOCKETS
from sparkpin.serve.proxy import RULES, ProxyOrder

HERE = Path(__file__).resolve().parent
CONTROL = {"model": MODEL, "messages": HELLO, "max_tokens": 40, "temperature": 0}
SECRET = "k" * 43  # no secret: the proxy's key of these trials
LOGGED = re.compile(r'"([A-Z]+) (\S+) HTTP/1\.1" \d+')
READY_S, GONE_S = 900, 20  # on a CPU with other work a start takes minutes
SECONDS = 2  # for a control's answer
PATHS = {path for paths in RULES["paths"].values() for path in paths}
ELSEWHERE = sorted({trial.path for trial in TRIALS} - PATHS)
STAGES = {"base": ([], OFF), "v2-tq": ([*cache("4bit_nc"), *MTP], {})}
ROUTES = """
import json, vllm
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
try: from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError: from vllm.entrypoints.launchers.cli_args import make_arg_parser
app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), ("generate",))
found, left = set(), list(app.routes)
while left:
    one = left.pop()
    left += getattr(getattr(one, "original_router", None), "routes", None) or []
    if path := getattr(one, "path", None):
        found.add((path, *sorted(getattr(one, "methods", None) or ["websocket"])))
print("ROUTES " + json.dumps([vllm.__version__, sorted(found)]))
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """folder: of its socket; share: which of the bare trials, (first, step); cores: how many of 16."""

    stage: str
    proxied: bool
    folder: str
    cores: tuple[int, int]
    share: tuple[int, int] = (0, 1)

    @property
    def name(self) -> str:
        return f"{'proxy' if self.proxied else 'bare'}-{self.stage}-{self.folder}"


JOBS = (
    Job("v2-tq", True, "a", (0, 4)),
    Job("base", True, "b", (4, 7)),
    Job("v2-tq", False, "c", (7, 10), (0, 2)),
    Job("v2-tq", False, "d", (10, 13), (1, 2)),
    Job("base", False, "e", (13, 16)),
)


class Victim:
    """A server, and what is asked of it by way of `url` (a proxy), or on its socket."""

    def __init__(self, job: Job, cpu: str | None, until: float, only: str) -> None:
        self.job, self.cpu, self.until, self.only, self.lives = job, cpu, until, only, 0
        self.socket = Path(SOCKETS) / job.folder / SOCKET
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def log(self) -> Path:
        return Path(f"{self.job.name}-{self.lives}.log")

    def up(self) -> float:
        """Seconds until it is ready."""
        self.stop()
        self.lives += 1
        arguments, environment = STAGES[self.job.stage]
        command = ["vllm"] if self.cpu else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        command += ["serve", self.cpu or str(HERE / "model"), "--served-model-name", MODEL, "--uds", str(self.socket)]
        command += ["--max-model-len", "2048", "--max-num-seqs", "4", "--reasoning-parser", "qwen3"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", *arguments]
        guarded, more_paths = ["--middleware", "sparkpin_guard.Guard"], ["--enable-scale-out"]
        command += guarded if self.job.proxied else more_paths
        if self.cpu:
            command += ["--enforce-eager", "--no-enable-prefix-caching", "--distributed-executor-backend", "uni"]
        else:
            command += ["--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.05"]
            command += ["--gdn-prefill-backend", "triton"]
            command += ["--compilation-config", json.dumps(COMPILED if self.job.proxied else GRAPHS)]
            folders = {"VLLM_CACHE_ROOT": f"/tmp/vllm-{self.job.name}", "TRITON_CACHE_DIR": "/tmp/triton"}
            environment = COMMON | folders | environment
        self.socket.unlink(missing_ok=True)
        begin = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
            )
        while time.monotonic() - begin < READY_S and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError), self.bare() as http:
                if http.get("/health").status_code == 200:
                    for _ in range(4):
                        self.control(self.bare())
                    return time.monotonic() - begin
            time.sleep(1)
        raise RuntimeError(f"{self.log} after {time.monotonic() - begin:.0f} s: {self.why()}")

    def why(self) -> str:
        return first_error(relevant(self.log.read_bytes()))

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if self.process:
                    os.killpg(self.process.pid, number)
                    self.process.wait(10)

    def bare(self) -> httpx.Client:
        return httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://server", timeout=60)

    def client(self) -> httpx.Client:
        if not self.url:
            return self.bare()
        return httpx.Client(base_url=self.url, headers={"x-api-key": SECRET}, trust_env=False, timeout=60)

    def control(self, opened: httpx.Client | None = None) -> float:
        begin = time.monotonic()
        with opened or self.client() as http:
            reply = http.post(CHAT, json=CONTROL)
        assert reply.status_code == 200, reply.text[:200]
        assert ANSWER.content in str(reply.json()["choices"][0]["message"]["content"]), reply.text[:300]
        return time.monotonic() - begin

    def ended(self) -> str | None:
        """How, if it does not answer a control any more."""
        assert self.process
        begin, fault = time.monotonic(), ""
        while time.monotonic() - begin < GONE_S:
            if self.process.poll() is not None:
                return f"ended with {self.process.returncode}: {self.why()}"
            try:
                self.control(self.bare())
                return None
            except (httpx.HTTPError, AssertionError) as error:
                fault = f"{type(error).__name__}: {error}"
                time.sleep(1)
        return f"does not answer ({fault}): {self.why()}"

    def tried(self, trial: Trial, way: str) -> dict[str, Any]:
        told = {"job": self.job.name, "way": way, "trial": trial.name, "path": trial.path, "kills": trial.kills}
        status, said, slowest, begin = "no answer", "", -1.0, time.monotonic()
        try:
            status, said, slowest = attack(self.client, trial, self.control)
            told["after_s"] = round(self.control(), 3)
        except (httpx.HTTPError, AssertionError) as error:
            told["fault"] = f"{type(error).__name__}: {error}"[:300]
        dead = self.ended() if "fault" in told else None
        return told | {
            "status": status, "said": said, "control_s": round(slowest, 3), "s": round(time.monotonic() - begin, 2),
            "dead": dead,
        }  # fmt: skip


@contextlib.contextmanager
def proxied(victim: Victim, port: int, limits: Limits, allow: list[str]) -> Iterator[Path]:
    """A proxy as `serve` starts it, by the HAProxy on PATH; the folder has its log."""
    folder = Path(f"proxy-{victim.job.name}-{port}").absolute()
    (folder / proxy.STATE).mkdir(parents=True, exist_ok=True)
    order = ProxyOrder("", "", "", "", Address(allow=tuple(allow), limits=limits), SECRET, None)
    (folder / proxy.HOLD).write_bytes(order.files[proxy.HOLD])
    (folder / proxy.CONFIG).write_text(order.config(str(folder), str(victim.socket.parent), f"127.0.0.1:{port}"))
    (victim.socket.parent / inside.PROXY_STATE).write_text(inside.UP)  # as process 1 of a served one does
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["haproxy", "-db", "-f", folder / proxy.CONFIG], stdout=log, stderr=log)
    try:
        victim.url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            with contextlib.suppress(httpx.HTTPError):
                victim.control()
                break
            time.sleep(0.2)
        else:
            raise RuntimeError(f"no answer of the proxy: {(folder / 'log').read_text()[-500:]}")
        yield folder
    finally:
        victim.url = ""
        process.kill()


def by_proxy(victim: Victim) -> Iterator[dict[str, Any]]:
    port = 8200 + 10 * JOBS.index(victim.job)
    alone: list[float] = []
    for way, allow in (("proxy", []), ("proxy, paths opened", ELSEWHERE)):
        with proxied(victim, port, Limits(), allow):
            alone += [victim.control() for _ in range(5)]
            for trial in TRIALS:
                if not re.search(victim.only, trial.name):
                    continue
                if time.monotonic() < victim.until and (not allow or trial.path in allow):
                    found = victim.tried(trial, way)
                    if found["control_s"] > SECONDS:  # what is compiled at its first use is there the next time
                        found = victim.tried(trial, way) | {"first_s": found["control_s"]}
                    yield found
                    if found["dead"]:
                        victim.up()
        port += 1
    yield {"job": victim.job.name, "alone_s": sorted(alone)[len(alone) // 2]}
    if victim.only:
        return
    before = victim.log.stat().st_size
    limits = Limits(per_second=1_000_000, idle=5)
    with proxied(victim, port, limits, []):
        tried, through = 0, list[str]()
        for trial in proxy_trials.trials(SECRET):
            if time.monotonic() < victim.until:
                tried += 1
                statuses = proxy_trials.sent(port, trial.raw)
                through += [] if proxy_trials.refused(statuses) else [f"{trial.why}: {statuses}"]
        ours = {("POST", CHAT)}
        reached = set(LOGGED.findall(victim.log.read_text(errors="replace")[before:])) - ours
        dead = victim.ended()
    yield {"job": victim.job.name, "way": "paths", "tried": tried, "through": through, "reached": sorted(reached),
           "dead": dead}  # fmt: skip


def directly(victim: Victim) -> Iterator[dict[str, Any]]:
    """First what a table's row refuses, then the other paths, then what its limits on JSON refuse."""
    limits = ("depth", "keys-200000", "digits", "utf-16", "a-number", "ten-megabytes", "one-megabyte")
    wanted = [trial for trial in TRIALS if refused_before(trial)]
    wanted += [trial for trial in TRIALS if trial.path not in PATHS and trial not in wanted]
    wanted += [trial for trial in TRIALS if trial.name.startswith(limits) and trial not in wanted]
    first, step = victim.job.share
    if victim.only:
        wanted = [trial for trial in TRIALS if re.search(victim.only, trial.name)]
    for trial in wanted[first::step]:
        if time.monotonic() > victim.until:
            yield {"job": victim.job.name, "way": "bare", "trial": trial.name, "status": "out of time"}
            continue
        yield (found := victim.tried(dataclasses.replace(trial, kills=trial.kills or "?"), "bare"))
        if found["dead"]:
            victim.up()
    if first == 0 and not victim.only:
        yield from routes(victim)


def routes(victim: Victim) -> Iterator[dict[str, Any]]:
    """What it has beside our table, and what becomes of it when that is asked for with an empty body."""
    with victim.bare() as http:
        told = http.get("/openapi.json").json()["paths"]
    yield {"job": victim.job.name, "way": "openapi", "routes": {path: sorted(ways) for path, ways in told.items()}}
    for path in sorted({*told, *proxy_trials.ROUTES} - PATHS):
        for method in ("GET", "POST"):
            if time.monotonic() > victim.until:
                return
            with contextlib.suppress(httpx.HTTPError), victim.bare() as http:
                status = http.request(method, path, json={} if method == "POST" else None, timeout=10).status_code
                if status not in (404, 405):
                    dead = victim.ended()
                    yield {"job": victim.job.name, "way": "route", "path": path, "method": method, "status": status,
                           "dead": dead}  # fmt: skip
                    if dead:
                        victim.up()


def run(job: Job, cpu: str | None, until: float, only: str) -> None:
    cores = set(range(*job.cores)) & os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or os.sched_getaffinity(0))  # of what it starts, too
    victim = Victim(job, cpu, until, only)
    with Path(f"{job.name}.jsonl").open("w") as file:
        try:
            print(job.name, f"ready after {victim.up():.0f} s", flush=True)
            for found in by_proxy(victim) if job.proxied else directly(victim):
                file.write(json.dumps(found) + "\n")
                file.flush()
        except Exception as error:
            file.write(json.dumps({"job": job.name, "error": f"{type(error).__name__}: {error}"}) + "\n")
            print(job.name, f"{type(error).__name__}: {error}", flush=True)
        finally:
            victim.stop()


def shown(lines: list[dict[str, Any]]) -> None:
    """What was not well, and counts."""
    for job in dict.fromkeys(line["job"] for line in lines):
        own = [line for line in lines if line["job"] == job and "trial" in line]
        print(job, len(own), "tried;", sum(bool(line.get("dead")) for line in own), "ended it")
    for line in lines:
        slow = max(line.get("control_s", 0), line.get("after_s", 0)) > SECONDS
        if "trial" in line and (line.get("dead") or slow or "fault" in line):
            text = (line.get("dead") or line.get("fault") or "")[:110]
            print(line["job"], line["way"], line["trial"], line["status"], line.get("control_s"), line.get("after_s"),
                  text)  # fmt: skip
        elif "trial" not in line:
            print(json.dumps(line)[:700])


def joined(files: list[str]) -> dict[str, Any]:
    """For each request and job: status, the slowest control beside it, and how it ended the server."""
    table: dict[str, Any] = {trial.name: {"path": trial.path} for trial in TRIALS}
    for file in files:
        for line in map(json.loads, Path(file).read_text().splitlines()):
            if line.get("trial") in table and "control_s" in line:
                ours = " by the proxy" if '"type":"proxy"' in line["said"] else ""
                said = [line["status"] + ours, max(line["control_s"], line.get("after_s", 0)), line["dead"]]
                place = f"{line['job'][:-2]}{', opened' if 'opened' in line['way'] else ''}"
                table[line["trial"]][place] = said if line["dead"] else said[:2]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="RESULTS", type=Path)
    parser.add_argument("jobs", metavar="JOB", nargs="*", default=[job.name for job in JOBS])
    parser.add_argument("--cpu", metavar="MODEL")
    parser.add_argument("--only", metavar="PATTERN", default="", help="requests whose name it is found in")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--join", action="store_true", help="write what calls have left, named after it, to RESULTS")
    given = parser.parse_intermixed_args()
    if given.join:
        rows = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in joined(given.jobs).items())
        given.out.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work = Path("/tmp/hostile")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    os.chdir(work)
    until = time.monotonic() + given.seconds - 40
    wanted = [job for job in JOBS if job.name in given.jobs]
    jobs = [multiprocessing.Process(target=run, args=(job, given.cpu, until, given.only)) for job in wanted]
    for job in jobs:
        job.start()
    told = subprocess.run([sys.executable, "-c", ROUTES], capture_output=True, text=True)
    made = [line[7:] for line in told.stdout.splitlines() if line.startswith("ROUTES ")]
    (out / "routes.json").write_text(made[0] if made else json.dumps(told.stderr[-2000:]))
    for job in jobs:
        job.join(max(1, until + 35 - time.monotonic()))
    lines = [line for path in sorted(work.glob("*.jsonl")) for line in path.read_text().splitlines()]
    (out / "results.jsonl").write_text("\n".join(lines) + "\n")
    with tarfile.open(out / "logs.tar.xz", "w:xz", preset=1) as tar:
        for path in sorted({*work.glob("*.log"), *work.glob("proxy-*/log")}):
            tar.add(path)
    shown([json.loads(line) for line in lines])
    for job in jobs:
        if job.is_alive():
            job.kill()


if __name__ == "__main__":
    main()

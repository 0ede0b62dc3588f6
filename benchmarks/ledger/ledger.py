"""Prove and measure many servers at once on one GPU: `ledger.py RESULTS --models FOLDER --call 1|2 [NAME...]`.

Each setup (setups.py) is a process that starts its server, asks it (asking.py) and ends it; so many run at a time, in
the order of the list. RESULTS: results.jsonl, a line as soon as a setup is done; figures.json, comparisons; rows-N.tar,
the log-probabilities that these are of; logs.tar.xz, logs of servers and sessions of finds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(PROJECT / "tests/support/sabotage")]

import asking  # noqa: E402
import compared  # noqa: E402
from setups import BY_NAME, CALLS, GRAPHS, Setup  # noqa: E402
from sparkpin_sabotage import install  # noqa: E402

from sparkpin.core.terminal import LOG, say  # noqa: E402
from sparkpin.measure.quality import run as measured  # noqa: E402
from sparkpin.smoke.client import Client  # noqa: E402

WORK = Path("/tmp/ledger")
CACHE = Path("/tmp/cache")
COMMON = {
    "VLLM_USE_DEEP_GEMM": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "TRITON_CACHE_DIR": str(CACHE / "triton"), "TRITON_CACHE_AUTOTUNING": "1", "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
    "CUDA_CACHE_PATH": str(CACHE / "nv"), "CUDA_CACHE_MAXSIZE": str(4 << 30), "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}  # fmt: skip
ENOUGH = 100.0  # seconds before the end after which no server is started
CLOSING = 35.0  # seconds for comparisons and archives
PART = 14 << 20  # bytes of an archive
ROOM = {"prove": 8192, "control": 8192, "boot": 8192, "ledger": 16384}
BLOCKS = "200"  # of a cache that is to be filled


class Server:
    def __init__(self, setup: Setup, port: int, models: Path, cpu: str) -> None:
        self.setup, self.port, self.log = setup, port, WORK / "logs" / f"{setup.name}.log"
        self.folder = WORK / "sabotage" / setup.name
        self.folder.mkdir(parents=True, exist_ok=True)
        flags: dict[str, str | None] = {
            "--served-model-name": "m", "--host": "127.0.0.1", "--port": str(port), "--seed": "0",
            "--max-model-len": str(ROOM[setup.job]), "--max-num-seqs": "16", "--max-num-batched-tokens": "2048",
            "--enable-prefix-caching": None, "--enable-prompt-tokens-details": None, "--max-logprobs": "20",
            "--reasoning-parser": "qwen3", "--enable-auto-tool-choice": None, "--tool-call-parser": "qwen3_coder",
        }  # fmt: skip
        if setup.job in ("prove", "control"):
            flags["--num-gpu-blocks-override"] = BLOCKS
        environment = {**os.environ, **COMMON, **setup.environment}
        if cpu:  # a rehearsal
            flags |= {"--enforce-eager": None, "--distributed-executor-backend": "uni", "--block-size": "128"}
            if "--speculative-config" in setup.flags:  # 0.32 has no cache with drafts there
                flags |= setup.flags | {"--no-enable-prefix-caching": None}
                del flags["--enable-prefix-caching"], flags["--block-size"]
            flags |= {"--max-model-len": "4096", "--num-gpu-blocks-override": "64", "--gpu-memory-utilization": "0.15"}
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
            command = ["vllm", "serve", cpu]
        else:
            flags |= {"--kv-cache-memory-bytes": str(setup.mib << 20), "--gpu-memory-utilization": "0.05"}
            flags |= {"--gdn-prefill-backend": "triton", "--compilation-config": json.dumps(GRAPHS)}
            flags |= setup.flags
            if setup.weights == "smollm2":  # it calls no tools, and has 8,192 positions
                flags = {key: value for key, value in flags.items() if "tool" not in key and "reasoning" not in key}
                flags["--max-model-len"] = "8192"
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(models / setup.weights)]
        if setup.job == "control":  # a plugin's thread does not live through a fork
            environment |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "SPARKPIN_SABOTAGE": str(self.folder)}
            environment["PYTHONPATH"] = f"{WORK / 'plugin'}:{environment.get('PYTHONPATH', '')}"
        command += [word for flag, value in flags.items() for word in ((flag, value) if value else (flag,))]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        (WORK / "pids" / setup.name).write_text(str(self.process.pid))

    def wait(self, healthy: Any, until: float) -> None:
        while not healthy():
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with {self.process.returncode}")
            if time.monotonic() > until:
                raise RuntimeError("not ready in time")
            time.sleep(0.5)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self.process.pid, number)
                self.process.wait(5)


def why(text: str) -> str:
    """The last error of a log that says something, for a server that did not start."""
    lines = [line for line in text.splitlines() if re.search(r"\w+(Error|Exception)\b: ", line)]
    own = [line for line in lines if "Engine core initialization failed" not in line]
    return re.sub(r"^\(\S+ pid=\d+\) \S+ \S+ \S+ \[[^\]]*\] ?", "", (own or lines or [text[-300:]])[-1])[:500]


def read_log(text: str) -> dict[str, Any]:
    size = re.findall(r"KV cache size: ([\d,]+) tokens", text)
    block = re.findall(r"Setting attention block size to (\d+)", text)
    backend = re.findall(r"Using (\S+) (?:attention )?backend|AttentionBackendEnum\.(\w+)", text)
    mods = re.findall(r"SPARKPIN_MOD (\{.*\})", text)
    return {
        "tokens": int(size[-1].replace(",", "")) if size else None,
        "block": int(block[-1]) if block else None,
        "backends": sorted({a or b for a, b in backend}),
        "mods": [one for one in map(json.loads, dict.fromkeys(mods)) if one.get("event") == "active"],
        "v2_runner": "V2" in "".join(re.findall(r"(?:Using|using) (V\d) [Mm]odel [Rr]unner", text)),
    }


def one(setup: Setup, port: int, models: Path, until: float, cpu: str) -> None:
    """In a process of its own: what was found goes to WORK/done/NAME.json."""
    begin = time.monotonic()
    found: dict[str, Any] = {"name": setup.name, "what": setup.what, "job": setup.job, "weights": setup.weights,
                             "flags": setup.flags, "mods_on": setup.mods}  # fmt: skip
    said = (WORK / "logs" / f"{setup.name}.said").open("w", buffering=1)
    LOG.handlers[:] = [logging.StreamHandler(said)]  # this process is the setup's own
    server = None
    try:
        while not cpu and not (models / setup.weights).exists() and until - time.monotonic() > ENOUGH / 2:
            time.sleep(0.5)  # it is being made
        server = Server(setup, port, models, cpu)
        with Client.url(f"http://127.0.0.1:{port}", timeout=150) as client:
            try:
                server.wait(client.healthy, until - 15)
            except RuntimeError:
                if "ddress already in use" not in server.log.read_text(errors="replace"):
                    raise
                server = Server(setup, port, models, cpu)  # another one took its port in between
                server.wait(client.healthy, until - 15)
            found["ready_s"] = round(time.monotonic() - begin, 1)

            folder = WORK / "proofs" / setup.name
            folder.mkdir(parents=True, exist_ok=True)
            if setup.job == "boot":
                found["text"], found["asked"] = asking.first_words(client), asking.drafted(client)
            elif setup.job == "ledger":
                all_of, found["asked"] = asking.measured(client)
                measured.save(WORK / "rows" / setup.name, all_of)
                measured.save(WORK / "rows" / f"{setup.name}{compared.LONG}", asking.long_texts(client))
            else:
                found["record"], proof = asking.proved(client, setup.name, folder)
                measured.save(WORK / "rows" / setup.name, asking.answers_of(proof))
                if setup.crosses:
                    save(found | {"partly": True})
                    found["crossing"] = asking.crossed(client, setup.name, folder / "crossing")
                if setup.job == "control":
                    save(found | {"partly": True})
                    found["faults"] = []
                    for fault in asking.faults(proof):
                        if until - time.monotonic() < 15:
                            found["faults"].append({"fault": fault, "skipped": "no time"})
                            continue
                        try:
                            found["faults"].append(asking.planted(proof, fault, folder / fault, server.folder))
                        except Exception as error:
                            text = f"{type(error).__name__}: {error}"[:600]
                            found["faults"].append({"fault": fault, "error": text})
                        say(str(found["faults"][-1])[:300])
                        save(found | {"partly": True})
            found["done_s"] = round(time.monotonic() - begin, 1)
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"[:600]
        said.write(traceback.format_exc())
    if server:
        server.stop()
        text = server.log.read_text(errors="replace")
        found |= read_log(text)
        if "error" in found:
            found["why"] = why(text)
    save(found)


def save(found: dict[str, Any]) -> None:
    path = WORK / "done" / f"{found['name']}.json"
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").replace(path)


def flush(out: Path) -> None:
    lines = [path.read_text() for path in sorted((WORK / "done").glob("*.json"))]
    (out / "results.jsonl").write_text("\n".join(lines) + "\n")


def archive(out: Path) -> None:
    with tarfile.open(out / "logs.tar.xz", "w:xz", preset=2) as tar:
        for path in (*sorted((WORK / "logs").iterdir()), *sorted((WORK / "proofs").rglob("*-session.json"))):
            if path.stat().st_size < 4 << 20:
                tar.add(path, path.relative_to(WORK))
    parts, size = list[list[Path]](), 0
    for folder in sorted((WORK / "rows").iterdir(), key=lambda path: path.stat().st_mtime):
        own = sum(path.stat().st_size for path in folder.iterdir())
        if not parts or size + own > PART:
            parts, size = [*parts, []], 0
        parts[-1].append(folder)
        size += own
    for number, part in enumerate(parts[:4]):
        with tarfile.open(out / f"rows-{number}.tar", "w") as tar:
            for folder in part:
                tar.add(folder, folder.name)
    for folder in itertools.chain(*parts[4:]):
        print(f"rows of {folder.name} do not come back: no room", flush=True)


def run(names: list[Setup], given: argparse.Namespace, until: float) -> None:
    waiting = list(enumerate(names))
    running: dict[str, multiprocessing.Process] = {}
    while (waiting or running) and time.monotonic() < until:
        for name, process in [*running.items()]:
            if not process.is_alive():
                del running[name]
                print(f"{given.seconds - (until - time.monotonic()):.0f} s:", shown(name), flush=True)
                flush(given.out)
        while waiting and len(running) < given.at_once and until - time.monotonic() > ENOUGH:
            number, setup = waiting.pop(0)
            process = multiprocessing.Process(target=one, args=(setup, 8300 + number, given.models, until, given.cpu))
            process.start()
            running[setup.name] = process
            time.sleep(given.apart)
        if until - time.monotonic() <= ENOUGH and waiting:
            print("not started:", *(setup.name for _, setup in waiting), flush=True)
            waiting = []
        time.sleep(0.3)
    for name, process in running.items():
        print("ended by time:", name, flush=True)
        process.kill()
    for path in (WORK / "pids").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def shown(name: str) -> str:
    path = WORK / "done" / f"{name}.json"
    if not path.exists():
        return f"{name}: nothing"
    found = json.loads(path.read_text())
    words = found.get("why") or found.get("error") or found.get("record", {}).get("line") or found.get("asked") or ""
    if "crossing" in found:
        words = f"{words} | CROSSING {found['crossing']['line']}"
    faults = [f"{one['fault']}: {one.get('record', one).get('line')}" for one in found.get("faults", ())]
    return f"{name}: ready {found.get('ready_s')}, done {found.get('done_s')}; {str(words)[:420]} {faults or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="RESULTS", type=Path)
    parser.add_argument("names", metavar="NAME", nargs="*")
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--call", choices=CALLS)
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--at-once", type=int, default=18)
    parser.add_argument("--apart", type=float, default=0.5, help="seconds between two starts")
    parser.add_argument("--cpu", default="", metavar="MODEL", help="a rehearsal with vLLM's CPU build")
    given = parser.parse_intermixed_args()
    until = time.monotonic() + given.seconds - CLOSING
    given.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(WORK, ignore_errors=True)
    for name in ("logs", "pids", "done", "rows", "proofs", "sabotage"):
        (WORK / name).mkdir(parents=True)
    install(WORK / "plugin")
    try:
        run([BY_NAME[name] for name in given.names] or list(CALLS[given.call]), given, until)
    finally:
        flush(given.out)
        archive(given.out)
        (given.out / "figures.json").write_text(json.dumps(compared.all_of(WORK / "rows", BY_NAME)))


if __name__ == "__main__":
    main()

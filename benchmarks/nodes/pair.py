"""The 122B's shape on two GPUs of one host, as two nodes, against one: milliseconds a step, over NVLink and sockets.

Runs beside benchmarks/stage_table's files, in the folder that its prepare.py made, with its site on PYTHONPATH.
OUT/JOB.json as the stage table's, OUT/JOB-RANK.log; `--show OUT` prints the table, here or there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

HERE = Path(__file__).resolve().parent
JOB_S = float(os.environ.get("JOB_S", "300"))
POINTS = [(context, batch) for context in (1024, 32768) for batch in (1, 8, 16)]
ONE, NVLINK, SOCKETS = "one", "nvlink", "sockets"
JOBS = (ONE, NVLINK, SOCKETS, "sockets+25", "sockets+100")
"""sockets+N: each packet on the loopback device N microseconds late."""
CACHE_BYTES = 22 << 30
"""Room for the points, so that a rank fits on 80 GB. The whole model beside it takes an H200."""
PORT = 29501


def delay_of(job: str) -> int:
    name, _, late = job.partition("+")
    if name not in (ONE, NVLINK, SOCKETS) or (late and (name != SOCKETS or not late.isdecimal())):
        raise SystemExit(f"{job}: expected {ONE}, {NVLINK}, {SOCKETS} or {SOCKETS}+MICROSECONDS")
    return int(late or 0)


def ranks_of(job: str) -> int:
    return 1 if job == ONE else 2


def more_arguments(job: str, rank: int) -> dict[str, Any]:
    """Of vllm.LLM, besides those of the stage."""
    fits = {"kv_cache_memory_bytes": CACHE_BYTES}
    if job == ONE:
        return fits
    return fits | {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "node_rank": rank,
        "master_addr": "127.0.0.1",
        "master_port": PORT,
        "distributed_executor_backend": "mp",
        "disable_custom_all_reduce": True,  # it takes the GPUs of both nodes for its own host's
    }


def environment(job: str, rank: int, out: Path) -> dict[str, str]:
    found = {
        "CUDA_VISIBLE_DEVICES": str(rank),
        "VLLM_HOST_IP": "127.0.0.1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TRITON_CACHE_DIR": f"/tmp/cache/triton-{rank}",
        "VLLM_CACHE_ROOT": f"/tmp/cache/vllm-{rank}",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(out / "plugin"), os.environ.get("PYTHONPATH", "")]),
    }
    if job.startswith(SOCKETS):
        found |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_HOSTID": f"n{rank}"}
    return found


def plugin(out: Path) -> None:
    """vLLM's workers are processes of their own: a plugin brings the random weights and the routing into each."""
    folder = out / "plugin/sparkpin_pair-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sparkpin-pair\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\nsparkpin_pair = pair:install\n")


def install() -> None:
    import randomly
    import table
    import uniform

    table.register()
    randomly.install()
    uniform.install()


def run_rank(job: str, rank: int, stage: str, out: Path) -> None:
    from stages import STAGES, arguments

    os.chdir(HERE)
    more = more_arguments(job, rank)
    if rank:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config = EngineArgs(**(arguments(STAGES[stage]) | more)).create_engine_config(headless=True)
        MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)
        return
    from measure import Measured

    m = Measured(STAGES[stage], out, job, compiled=True, **more)
    for context, batch in POINTS:
        m.case(lambda c=context, b=batch: m.decode(c, b), f"decode {context}:{batch}")
    m.save()


def run_job(job: str, stage: str, out: Path) -> str:
    """What went wrong, "" where nothing did."""
    late = delay_of(job)
    (out / f"{job}.json").unlink(missing_ok=True)  # of an earlier call: the table is not to show it as this one's
    if late:
        netem = ["tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", f"{late}us"]
        try:
            subprocess.run(netem, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"tc: {getattr(error, 'stderr', '') or error}".strip()
    processes = []
    try:
        for rank in range(ranks_of(job)):
            command = [sys.executable, str(HERE / "pair.py"), str(out), job, "--stage", stage, "--rank", str(rank)]
            with (out / f"{job}-{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(
                    command, env=os.environ | started(stage) | environment(job, rank, out), stdout=log,
                    stderr=subprocess.STDOUT, start_new_session=True,
                ))  # fmt: skip
        status = processes[0].wait(JOB_S)
        return f"rank 0 ended with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"not done after {JOB_S:g} s"
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if late:
            subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False)


def started(stage: str) -> dict[str, str]:
    from table import ENVIRONMENT

    from stages import STAGES

    return ENVIRONMENT | STAGES[stage].environment


def rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """results: a job's JSON. Of each point the milliseconds of each job, how much longer sockets take than NVLink, and
    the exchanges of a step: more milliseconds for each microsecond that a packet is late, where three jobs tell."""
    yield ("context:users", *results, "sockets - nvlink", "exchanges")
    for point in [f"{context}:{batch}" for context, batch in POINTS]:
        ms = {job: found["decode"][point]["step_ms"] for job, found in results.items() if point in found["decode"]}
        rest = f"{ms[SOCKETS] - ms[NVLINK]:.2f}" if {NVLINK, SOCKETS} <= set(ms) else "-"
        late = [(delay_of(job), ms[job]) for job in ms if job.startswith(SOCKETS)]
        slope = f"{1e3 * linear_regression(*zip(*late, strict=True)).slope:.0f}" if len(late) > 2 else "-"
        yield (point, *(f"{ms[job]:.2f}" if job in ms else "-" for job in results), rest, slope)


def show(out: Path) -> None:
    paths = [out / f"{job}.json" for job in JOBS]
    for row in rows({path.stem: json.loads(path.read_text()) for path in paths if path.is_file()}):
        print("  ".join(f"{cell:>17}" for cell in row))


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for results")
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)} (default: all)")
    parser.add_argument("--stage", default="v2", help="of the stage table (default: v2)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--show", action="store_true", help="the table of what is in OUT, and nothing else")
    given = parser.parse_args(words)
    out = given.out.resolve()
    for job in given.jobs:
        delay_of(job)
    if given.rank is not None:
        run_rank(given.jobs[0], given.rank, given.stage, out)
        return
    if not given.show:
        out.mkdir(parents=True, exist_ok=True)
        plugin(out)
        sys.path.insert(0, str(HERE))
        for job in given.jobs or JOBS:
            begin, wrong = time.monotonic(), run_job(job, given.stage, out)
            print(job, f"{time.monotonic() - begin:.0f} s", wrong or "done", flush=True)
    show(out)


if __name__ == "__main__":
    main(sys.argv[1:])

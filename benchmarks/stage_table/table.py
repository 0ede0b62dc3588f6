"""The stage table: real vLLM with the full shape and random weights, stage after stage, on one GPU.

Runs in the folder that prepare.py made, with its site unpacked on PYTHONPATH. vLLM is imported once; each job is a fork
of that process. OUT/NAME.json and OUT/NAME.log; OUT/run.json for join.py, which wants a folder a call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages import BATCHES, CHECKED, CONTEXTS, STAGES, conversation, lengths

HERE = Path(__file__).resolve().parent
JOB_S = float(os.environ.get("JOB_S", "200"))
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_CACHE_AUTOTUNING": "1",
    "TRITON_CACHE_DIR": "/tmp/cache/triton",
    "VLLM_CACHE_ROOT": "/tmp/cache/vllm",
    "CUDA_CACHE_PATH": "/tmp/cache/nv",
    "CUDA_CACHE_MAXSIZE": str(4 << 30),
}
EVERY = list(itertools.product(CONTEXTS, BATCHES))
PROFILED = [(1024, 1), (131072, 1), (1024, 16)]


@dataclass(frozen=True)
class Points:
    """decode, profiled: contexts and sequences; routed: sequences; first: context and prompts at once -> how often;
    turns: tokens of a conversation's first prompt; match: of its prefix cache; lengths: contexts and sequences at
    which numbers of drafted tokens are compared."""

    decode: Sequence[tuple[int, int]]
    profiled: Sequence[tuple[int, int]]
    routed: Sequence[int]
    first: Mapping[tuple[int, int], int]
    turns: Sequence[int] = ()
    match: int | None = None
    lengths: Sequence[tuple[int, int]] = ()


FIRST = {(1024, 1): 3, (1024, 8): 1, (1024, 16): 1, (32768, 1): 1}
ALL = Points(EVERY, PROFILED, BATCHES, FIRST)
TURNS = Points((), (), (), {}, turns=(32768,))
OPTIONS = {
    "few": Points([(1024, 1), (1024, 8), (1024, 16), (131072, 1), (131072, 16)], [(1024, 1), (1024, 16)], (1, 16), {}),
    "long": replace(ALL, first={**FIRST, (131072, 1): 1}),
    "own": ALL,
    "eager": ALL,
    "turns": TURNS,
    "match": replace(TURNS, match=32),
    "lengths": Points((), (), (), {}, lengths=[(1024, batch) for batch in BATCHES]),
    "peers": Points([(1024, 1), (131072, 1), (131072, 16)], [(131072, 1)], (), {}),
    "": ALL,
}
MEANINGS = {
    "peers": "what kinds of K and V differ by: three points of nine, and a profile of 128K x 1",
    "few": "five points of nine, no prefill",
    "long": "with a prefill of 128K",
    "own": "the router's own choice of experts (else routing is uniform, imposed)",
    "eager": "without torch.compile",
    "turns": "turns of a conversation, whose prefix cache matches whole blocks, and nothing else",
    "match": "the same with a prefix cache that matches 32 tokens",
    "lengths": "0 to 4 drafted tokens, of which each is accepted with a chance of 0.5 to 0.9; a stage that drafts",
}
"""Of OPTIONS, for the usage."""

READY = "ready"
"""A file that says that nothing else runs on the GPU: stages that have started wait for it."""


def warm() -> None:
    """Import what every job needs, without touching the GPU: a fork cannot use a GPU that was in use before."""
    import torch
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.fp8
    import vllm.model_executor.layers.quantization.inc
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu.spec_decode.eagle.speculator
    import vllm.v1.worker.gpu_worker  # noqa: F401

    if torch.cuda.is_initialized():
        raise RuntimeError("importing vLLM initialised CUDA: its forks could not use it")


def untuned() -> None:
    """Triton's tuners take their first configuration: checks need to start soon, not to be fast."""
    from triton.runtime import autotuner

    original = autotuner.Autotuner.__init__

    def first_only(self: Any, fn: Any, names: Any, configs: Any, *more: Any, **named: Any) -> None:
        original(self, fn, names, configs[:1], *more, **named)

    autotuner.Autotuner.__init__ = first_only


def register() -> None:
    """A registered class is looked at in this process; one that is only named, in one that imports vLLM again."""
    from vllm.model_executor.models.qwen3_5 import Qwen3_5MoeForCausalLM
    from vllm.model_executor.models.qwen3_5_mtp import Qwen3_5MoeMTP
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("Qwen3_5MoeForCausalLM", Qwen3_5MoeForCausalLM)
    ModelRegistry.register_model("Qwen3_5MoeMTP", Qwen3_5MoeMTP)


def label_of(name: str, option: str) -> str:
    return f"{name}-{option}" if option else name


def run_stage(name: str, out: Path, option: str) -> None:
    import randomly
    import uniform
    from measure import Measured

    points = OPTIONS[option]
    randomly.install()
    if option != "own":
        uniform.install()
    more = conversation(points.match) if points.turns else lengths(STAGES[name]) if points.lengths else {}
    m = Measured(STAGES[name], out, label_of(name, option), compiled=option != "eager", **more)
    while not (out / READY).exists():
        time.sleep(0.1)
    for context, batch in points.decode:
        m.case(lambda c=context, b=batch: m.decode(c, b), f"decode {context}:{batch}")
    for (context, batch), repeat in points.first.items():
        m.case(lambda c=context, b=batch, r=repeat: m.first_token(c, b, r), f"first {context}:{batch}")
    for batch in points.routed:
        m.case(lambda b=batch: m.routing(1024, b), f"routing 1024:{batch}")
    for context, batch in points.profiled:
        m.case(lambda c=context, b=batch: m.profile(c, b), f"profile {context}:{batch}")
    for context, batch in points.lengths:
        m.case(lambda c=context, b=batch: m.lengths(c, b), f"lengths {context}:{batch}")
    for context in points.turns:
        m.case(lambda c=context: m.turns(c), f"turns {context}")
    m.free()


def run_check(name: str, out: Path, option: str) -> None:
    """Answers of the scripted model, by a stage of the chain."""
    from vllm import LLM, SamplingParams

    from stages import scripted_arguments

    begin = time.monotonic()
    llm = LLM(**scripted_arguments(STAGES[name]))
    ready = time.monotonic() - begin
    cases = json.loads((HERE / "cases.json").read_text())
    params = SamplingParams(temperature=0, max_tokens=400)
    needles = [{"prompt_token_ids": ids} for ids in cases["needles"].values()]
    one_by_one = [llm.generate(needle, params, use_tqdm=False)[0] for needle in needles]
    together = llm.generate(needles, params, use_tqdm=False)
    chats = [[{"role": "user", "content": word}] for word in cases["chats"]]
    talked = llm.chat(chats, params, use_tqdm=False)
    texts = [answer.outputs[0].text for answer in (*one_by_one, *together, *talked)]
    wanted = [cases["content"]] * (2 * len(needles)) + list(cases["chats"].values())
    found = {
        "stage": name,
        "ready_s": round(ready, 1),
        "right": sum(map(str.__eq__, texts, wanted)),
        "of": len(wanted),
        "ids": [list(answer.outputs[0].token_ids) for answer in (*one_by_one, *together, *talked)],
    }
    (out / f"check-{name}.json").write_text(json.dumps(found) + "\n")


def start(run: Callable[[str, Path, str], None], name: str, out: Path, option: str, label: str) -> int:
    """A fork, its output in a file of its own, with the stage's mods switched on."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        log = os.open(out / f"{label}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(STAGES[name].environment)
        if run is run_check:
            untuned()
        register()
        run(name, out, option)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(jobs: dict[int, str]) -> dict[str, int]:
    """Statuses by label; what takes longer than JOB_S is killed."""
    begin, found = time.monotonic(), {}
    while len(found) < len(jobs):
        for pid, label in jobs.items():
            if label in found:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[label] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() - begin > JOB_S:
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.2)
    return found


def usage() -> argparse.ArgumentParser:
    """What is said without vLLM, which takes a while to import and is not everywhere."""
    jobs = {
        "check": "answers of the scripted model, which are known, while the next job starts; all at once by",
        "": ", ".join(CHECKED),
        **{f"{name}[@OPTION]": stage.what for name, stage in STAGES.items()},
    }
    lines = ["jobs, one after another:", *(f"  {job:<20}{what}" for job, what in jobs.items())]
    lines += ["", "options of a stage, one a job:", *(f"  @{name:<19}{what}" for name, what in MEANINGS.items())]
    lines += ["", "in the environment:"]
    lines += [f"  {'JOB_S':<20}seconds after which a job is killed, its start counted; 200 if not given. A start with"]
    lines += [f"  {'':<20}empty caches (/tmp/cache) takes 170 to 230 alone: give 300 then"]
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder for results, another one for each call")
    parser.add_argument("jobs", metavar="JOB", nargs="*", help="check, a stage, or STAGE@OPTION: see below")
    return parser


def main(arguments: list[str]) -> None:
    parser = usage()
    given = parser.parse_args(arguments or ["--help"])
    out = given.out.resolve()
    for job in given.jobs or [""]:
        name, at, option = job.partition("@")
        if job != "check" and (name not in STAGES or (at and option not in MEANINGS)):
            known = f"stages: {', '.join(STAGES)}; options: {', '.join(MEANINGS)}"
            parser.error(f"{job or 'no job'}: expected check, or STAGE or STAGE@OPTION; {known}")
    if not (HERE / "cases.json").is_file():
        parser.error(f"{HERE} has no cases.json: run table.py in the folder that prepare.py made")
    out.mkdir(parents=True, exist_ok=True)
    os.environ.update({k: os.environ.get(k, v) for k, v in ENVIRONMENT.items()})
    os.chdir(HERE)
    sys.path.insert(0, str(HERE))
    begin = time.monotonic()
    warm()
    times: dict[str, Any] = {"imports": round(time.monotonic() - begin, 1)}
    run = facts(given.jobs)  # now, too: a call may be ended by its time limit
    (out / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    checks: dict[int, str] = {}
    for job in given.jobs:
        at = time.monotonic()
        name, _, option = job.partition("@")
        if name == "check":
            checks = {start(run_check, one, out, "", f"check-{one}"): f"check-{one}" for one in CHECKED}
            continue
        label = label_of(name, option)
        (out / READY).unlink(missing_ok=True)  # an earlier job's, or an earlier call's
        jobs = {start(run_stage, name, out, option, label): label}
        times |= wait(checks)
        checks = {}
        (out / READY).touch()
        times |= wait(jobs)
        times[f"{label} s"] = round(time.monotonic() - at, 1)
        print(label, times, flush=True)
    times |= wait(checks)
    print(times, flush=True)
    (out / "run.json").write_text(json.dumps(run | {"times": times}, indent=1) + "\n")


def facts(jobs: list[str]) -> dict[str, Any]:
    """What `join.py` wants to know of a run. The GPU's names come from outside: this process must not use it."""
    import torch
    import vllm

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, _, driver = subprocess.run(query, capture_output=True, text=True).stdout.strip().partition(", ")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": gpu or "unknown",
        "driver": driver or "unknown",
        "routing": "uniform",
        "jobs": " ".join(jobs),
    }


if __name__ == "__main__":
    main(sys.argv[1:])

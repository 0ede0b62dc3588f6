"""Checkpoints: how fast they are built beside `cp`, in how much memory, how fast they are planned.

usage: .venv/bin/python benchmarks/checkpoint.py [--folder FOLDER] [--runs 5] [--size 6] [--curve 1,2,4,8]

Two made-up repositories with the names and tensors of the real pair: an INT4 base of random bytes (14 shards and the
MTP file; as many tensors for a GB as the real one has) and an FP8 donor that lends its shared experts. In turns:

- `invoke build --checkpoint-only`: the whole command, from the start of its process to its end. The base has been
  fetched and found right before, by its hash; donors' parts are here. It reads pin and lock, checks the base's
  files, plans, writes and hashes every shard, links the rest, checks, syncs, renames.
- its writing: `write_checkpoint` alone, in a process of its own.
- `cp -r` of the base with coreutils, then `sync FILE...` of the copy.

Speeds are bytes written by seconds: a build links the MTP file, which counts for `cp` only. "Of cp" is the median of
the pairs of one round, so that what else the machine does meets both. Processor seconds are of the processes, without
the kernel's own threads. Checkpoints of former runs keep their links: one that goes changes the ctime of the base's
file, and costs its hash once more (docs/checkpoints.md). Warm: the base was read before. Cold: the kernel was asked to
forget its files. Memory: the peak of the command (VmHWM). The plan is made for 113,000 tensors of the base and 75,000
of the donor, from headers on disk. Fetching: the pair is locked over HTTP, and the server counts what it sends of their
files. Goals: a median of 0.6 of `cp`'s speed warm and of 1.2 cold; 200 MB; 3 s; at most 1.01 of the bytes needed. Below
one of them the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

from checkpoint_samples import listing_of
from hub import Request, serve, use
from places import PROJECT

from sparkpin.checkpoint.content import Hashes
from sparkpin.checkpoint.plan import make_plan, summary
from sparkpin.checkpoint.repository import Listing, Places
from sparkpin.checkpoint.safetensors import build_header, tensor_nbytes
from sparkpin.checkpoint.steps import all_steps
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.fetch import lock_model
from sparkpin.pins.schema import UNRESOLVED, LockedFile, ModelLock, ModelPin, RepositoryLock

Spec = tuple[str, tuple[int, ...]]
Tensors = dict[str, Spec]

GOAL_SPEED = {"warm": 0.6, "cold": 1.2}
GOAL_MEMORY, GOAL_PLAN, GOAL_FETCH = 200e6, 3.0, 1.01
SHARDS, LAYERS, BLOCK = 14, 48, 128
EXPERTS, REAL_SIZE = 258, 72
"""Experts in a layer, and GB of the base that they make 113,000 tensors of: a smaller base has fewer in proportion."""
EXTRA = "model_extra_tensors.safetensors"
POOL = 64 << 20
BODY = "model.language_model.layers."

PIN = ModelPin.model_validate(
    {
        "name": "bench",
        "description": "made up",
        "base": "int4",
        "repositories": {
            "int4": {"repo": "bench/int4", "revision": "a" * 40},
            "fp8": {"repo": "bench/fp8", "revision": "b" * 40},
        },
        "hybrid": {
            "rules": [
                {
                    "modules": [f"model.*.mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")],
                    "format": "fp8",
                    "source": "fp8",
                    "block": [BLOCK, BLOCK],
                }
            ]
        },
        "mtp": {"file": EXTRA, "tensors": ["mtp.*"]},
    }
)


def linear_layers(experts: int, hidden: int, inner: int) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of every linear layer of the body."""
    for layer in range(LAYERS):
        prefix = f"{BODY}{layer}."
        if layer % 4 == 3:
            for part in "qkvo":
                yield f"{prefix}self_attn.{part}_proj", hidden, hidden
        else:
            for part in ("in_proj_qkv", "in_proj_z", "out_proj"):
                yield f"{prefix}linear_attn.{part}", hidden, hidden
        for name in [f"experts.{number}" for number in range(experts)] + ["shared_expert"]:
            yield f"{prefix}mlp.{name}.gate_proj", inner, hidden
            yield f"{prefix}mlp.{name}.up_proj", inner, hidden
            yield f"{prefix}mlp.{name}.down_proj", hidden, inner


def plain(experts: int, hidden: int) -> Tensors:
    """What no repository quantises."""
    tensors: Tensors = {
        "lm_head.weight": ("BF16", (1024, hidden)),
        "model.embed_tokens.weight": ("BF16", (1024, hidden)),
    }
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{BODY}{layer}.{name}.weight"] = ("BF16", (hidden,))
        tensors[f"{BODY}{layer}.mlp.gate.weight"] = ("BF16", (experts, hidden))
    return tensors


def mtp(experts: int, hidden: int, inner: int) -> Tensors:
    tensors: Tensors = {"mtp.fc.weight": ("BF16", (hidden, 2 * hidden))}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = ("BF16", (hidden,))
    prefix = f"{BODY}3."
    for name, rows, columns in linear_layers(experts, hidden, inner):
        if name.startswith(prefix):
            tensors[f"mtp.layers.0.{name.removeprefix(prefix)}.weight"] = ("BF16", (rows, columns))
    for name, spec in plain(experts, hidden).items():
        if name.startswith(prefix):
            tensors[f"mtp.layers.0.{name.removeprefix(prefix)}"] = spec
    return tensors


def base_tensors(experts: int, hidden: int, inner: int) -> Tensors:
    tensors = plain(experts, hidden)
    for name, rows, columns in linear_layers(experts, hidden, inner):
        if ".shared_expert." in name:
            tensors[f"{name}.weight"] = ("BF16", (rows, columns))
        else:
            tensors[f"{name}.qweight"] = ("I32", (columns // 8, rows))
            tensors[f"{name}.qzeros"] = ("I32", (columns // BLOCK, rows // 8))
            tensors[f"{name}.scales"] = ("F16", (columns // BLOCK, rows))
    return tensors


def donor_tensors(experts: int, hidden: int, inner: int) -> Tensors:
    tensors = plain(experts, hidden)
    for name, rows, columns in linear_layers(experts, hidden, inner):
        tensors[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
        tensors[f"{name}.weight_scale_inv"] = ("BF16", (-(-rows // BLOCK), -(-columns // BLOCK)))
    return tensors


def shards_of(tensors: Tensors) -> dict[str, Tensors]:
    """Cut by layers, as published ones are."""
    shards: dict[str, Tensors] = {f"model-{n:05}-of-{SHARDS:05}.safetensors": {} for n in range(1, SHARDS + 1)}
    names = list(shards)
    for name, spec in tensors.items():
        layer = int(name.removeprefix(BODY).partition(".")[0]) if name.startswith(BODY) else 0
        shards[names[layer * SHARDS // LAYERS]][name] = spec
    return shards


def write_repository(folder: Path, shards: Mapping[str, Tensors], config: Mapping[str, Any], *, data: bool) -> None:
    """data: random bytes; otherwise files with holes, whose headers alone are real."""
    folder.mkdir(parents=True)
    pool = random.Random(folder.name).randbytes(POOL) if data else b""
    for file, tensors in shards.items():
        header, _ = build_header((name, *spec) for name, spec in tensors.items())
        size = sum(tensor_nbytes(*spec) for spec in tensors.values())
        with (folder / file).open("wb") as out:
            out.write(header)
            while data and size:
                size -= out.write(memoryview(pool)[: min(size, POOL - size % 4096)])
            out.truncate(out.tell() + size)
    weight_map = {name: file for file, tensors in shards.items() if file != EXTRA for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def write_pair(root: Path, experts: int, hidden: int, inner: int, *, data: bool) -> None:
    """Both repositories."""
    base = shards_of(base_tensors(experts, hidden, inner)) | {EXTRA: mtp(experts, hidden, inner)}
    text = {"mtp_num_hidden_layers": 1, "num_experts": experts}
    int4 = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}
    write_repository(root / "int4", base, {"text_config": text, "quantization_config": int4}, data=data)
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    shards = shards_of(donor_tensors(experts, hidden, inner))
    write_repository(root / "fp8", shards, {"quantization_config": fp8}, data=False)


def inner_size(gigabytes: float, experts: int, hidden: int) -> int:
    """Rows of an expert's matrices, for a base of that size."""
    per_row = 3 * hidden * (LAYERS * experts * (0.5 + 2.5 / BLOCK) + LAYERS * 2 + experts * 2)
    return max(BLOCK, round(gigabytes * 1e9 / per_row / BLOCK) * BLOCK)


def listings(root: Path) -> dict[str, Listing]:
    return {name: listing_of(name, root / name) for name in ("int4", "fp8")}


def lock_of(root: Path) -> ModelLock:
    """Sizes are right, hashes are not: building does not read them."""

    def rows(folder: Path) -> list[LockedFile]:
        found = sorted(folder.iterdir())
        return [LockedFile(name=p.name, file=p.name, size=p.stat().st_size, sha256="0" * 64) for p in found]

    locks = {
        name: RepositoryLock(repo=entry.repo, revision=entry.revision, files=rows(root / name))
        for name, entry in PIN.repositories.items()
    }
    return ModelLock(model=PIN.name, inputs="0" * 64, repositories=locks)


def high_water(process: int | str = "self") -> int:
    """Peak of a process's memory in bytes, 0 when it has ended; ru_maxrss would count the parent's before the exec."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def child_plan(root: Path) -> dict[str, float]:
    begun = time.perf_counter()
    plan = make_plan(listings(root), PIN, all_steps(PIN))
    seconds = time.perf_counter() - begun
    lines = summary(plan)
    whole = time.perf_counter() - begun
    return {"seconds": seconds, "in_words": whole, "lines": len(lines), "memory": high_water()}


def child_build(root: Path) -> dict[str, float]:
    from sparkpin.checkpoint.write import write_checkpoint

    places = Places({name: root / name for name in PIN.repositories}, {})
    plan, hashes, lock = make_plan(listings(root), PIN, all_steps(PIN)), Hashes(root / "hashed.json"), lock_of(root)
    for name, entry in lock.repositories.items():
        for file in entry.files:
            hashes.note(root / name / file.file, file.sha256)
    planned = time.perf_counter()
    write_checkpoint(root / "made", PIN, lock, plan, places, hashes)
    ended = time.perf_counter()
    return {"seconds": ended - planned, "memory": high_water()}


def child_fetch(root: Path) -> dict[str, float]:
    """Lock the pair over HTTP from a Hub of our own, which counts what it sends of the repositories' files."""
    sent: list[Request] = []
    os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    with serve(root / "hub", log=sent) as url, pytest.MonkeyPatch.context() as patch:
        use(patch, url)
        pin = PIN.model_dump(mode="json", exclude={"name"})
        for repository in pin["repositories"].values():
            repository["revision"] = UNRESOLVED
        project = root / "project"
        (project / "pins/models").mkdir(parents=True)
        (project / "pins/models/bench.yaml").write_text(json.dumps(pin))
        begun = time.perf_counter()
        lock = lock_model.lock_model(Paths(project, root / "cache", root / "home"), "bench")
        seconds = time.perf_counter() - begun
    texts = {"model.safetensors.index.json", "config.json"}
    needed = total = 0
    for entry in lock.repositories.values():
        needed += sum(part.size for part in (*entry.headers, *entry.tensors))
        needed += sum(file.size for file in entry.files if file.file in texts)
        total += sum(file.size for file in entry.files)
    return {"needed": needed, "sent": sum(content(root, r) for r in sent), "total": total, "seconds": seconds}


def content(root: Path, request: Request) -> int:
    """Bytes of a file that an answer carries: of large ones the part asked for, behind a redirect; small ones whole."""
    if request.method != "GET":
        return 0
    if span := re.fullmatch(r"bytes=(\d+)-(\d+)", request.range):
        return int(span[2]) - int(span[1]) + 1 if request.path.startswith("/blobs/") else 0
    if request.path.startswith("/blobs/"):
        raise RuntimeError(f"{request.path} was asked for without a range")
    found = re.fullmatch(r"/(bench/\w+)/resolve/\w+/(.*\.json)", request.path)
    return (root / "hub" / found[1] / found[2]).stat().st_size if found else 0


def child(kind: str, root: Path) -> dict[str, float]:
    argv = [sys.executable, __file__, f"--child={kind}", "--folder", str(root)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    made: dict[str, float] = json.loads(done.stdout)
    return made


def processor() -> float:
    """Processor seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def clear(folder: Path, kept: Path) -> None:
    """Remove a folder but for hard links, which go to `kept`: a link that is removed or renamed has another ctime."""
    if folder.is_dir():
        folder.rename(kept)
        for path in kept.rglob("*"):
            if path.is_file() and path.stat().st_nlink == 1:
                path.unlink()


def copy(root: Path) -> float:
    """Seconds of `cp -r` of the base, and of `sync` for each file of the copy."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", "--", str(root / "int4"), str(root / "copied")], check=True)
    subprocess.run(["sync", *(str(path) for path in (root / "copied").iterdir())], check=True)
    return time.perf_counter() - begun


def lock_pair(root: Path) -> dict[str, str]:
    """A project with the pair as folders of this machine, locked; gives the environment of its commands."""
    project = root / "project"
    (project / "pins/models").mkdir(parents=True)
    for name in ("tasks.py", "stages", "mods", "dockerfiles", "pins/stacks"):
        (project / name).symlink_to(PROJECT / name)
    pin = PIN.model_dump(mode="json", exclude={"name"})
    for name, repository in pin["repositories"].items():
        repository |= {"revision": UNRESOLVED, "folder": str(root / name)}
    (project / "pins/models/bench.yaml").write_text(json.dumps(pin))
    places = {"PROJECT": project, "CACHE": root / "cache", "HOME": root / "home"}
    environment = os.environ | {f"SPARKPIN_{name}": str(place) for name, place in places.items()}
    run("lock --model bench", environment)
    recipe = {"name": "bench", "recipe_version": "1", "model": "bench/int4", "container": "sparkpin/bench"}
    lock = yaml.safe_load((project / "pins/models/bench.lock").read_text())
    recipe |= {"model_revision": lock["repositories"]["int4"]["revision"], "stack": "cpu"}
    recipe |= {"stage": "mtp", "command": "vllm serve /model"}
    (project / "recipes").mkdir()
    (project / "recipes/bench.yaml").write_text(json.dumps(recipe))
    return environment


def run(task: str, environment: Mapping[str, str]) -> tuple[float, int]:
    """Seconds and peak memory in bytes of a whole command, from the start of its process to its end."""
    line = [Path(sys.executable).with_name("sparkpin"), *task.split()]
    begun, peak = time.perf_counter(), 0
    with subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            peak = max(peak, high_water(process.pid))
            time.sleep(0.01)
        seconds = time.perf_counter() - begun
        if process.returncode:
            raise RuntimeError(f"{task}: {process.stderr.read().decode() if process.stderr else ''}")
    return seconds, peak


def forget(root: Path) -> None:
    os.sync()
    for path in (root / "int4").iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def warm(root: Path) -> None:
    os.sync()
    for path in sorted((root / "int4").iterdir()):
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(1 << 20)
            while file.readinto(buffer):
                pass


def compare(root: Path, gigabytes: float, runs: int) -> dict[str, float]:
    """Medians of the whole command, of its writing alone and of cp for one size; prints each run."""
    hidden, experts = 512, max(8, round(EXPERTS * gigabytes / REAL_SIZE))
    write_pair(root, experts, hidden, inner_size(gigabytes, experts, hidden), data=True)
    size = sum(path.stat().st_size for path in (root / "int4").iterdir())
    shards = sum(path.stat().st_size for path in (root / "int4").glob("model-*.safetensors"))
    environment, rows, result = lock_pair(root), [], {"memory": 0.0, "size": float(size)}
    run("build --checkpoint-only --recipe bench", environment)  # the base is linked to the cache
    own = root / "int4" / EXTRA
    shutil.copy(own, root / EXTRA)
    (root / EXTRA).replace(own)  # another file than the cache's: "its writing" links it, and removes the link
    shutil.rmtree(root / "home")
    run("build --checkpoint-only --recipe bench", environment)  # the base is hashed, and known from then on
    for state, prepare in (("warm", warm), ("cold", forget)):
        speeds: dict[str, list[float]] = {"invoke build --checkpoint-only": [], "its writing": [], "cp -r, sync": []}
        used: dict[str, list[float]] = {what: [] for what in speeds}
        kinds = list(speeds)
        for number in range(runs):
            for what in kinds:
                clear(root / "home", root / f"former-{state}-{number}-{what}")
                for name in ("made", "copied"):
                    shutil.rmtree(root / name, ignore_errors=True)
                prepare(root)
                before = processor()
                if what == "cp -r, sync":
                    speeds[what].append(size / copy(root))
                elif what == "its writing":
                    speeds[what].append(shards / child("build", root)["seconds"])
                else:
                    seconds, memory = run("build --checkpoint-only --recipe bench", environment)
                    speeds[what].append(shards / seconds)
                    result["memory"] = max(result["memory"], memory)
                used[what].append(processor() - before)
            kinds.append(kinds.pop(0))
        for what, found in speeds.items():
            pairs = [speed / other for speed, other in zip(found, speeds["cp -r, sync"], strict=True)]
            result[f"{what}, {state}"] = ratio = statistics.median(pairs)
            each = " ".join(f"{pair:.2f}" for pair in pairs)
            figures = (statistics.median(found) / 1e9, ratio, statistics.median(used[what]))
            rows.append((state, what, *(f"{figure:.2f}" for figure in figures), each))
    terminal.table(("cache", "what", "GB/s", "of cp", "CPU s", "each pair"), rows)
    terminal.show(f"load: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    return result


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--size", type=float, default=6.0, help="GB of the base")
    options.add_argument("--curve", default="1,2,4,8", help="GB of more bases, one run each; empty for none")
    options.add_argument("--child", default="")
    given = options.parse_args()
    if given.child:
        print(json.dumps({"plan": child_plan, "build": child_build, "fetch": child_fetch}[given.child](given.folder)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="checkpoint-") as folder:
        sys.exit(
            measure(Path(folder), given.runs, given.size, [float(size) for size in given.curve.split(",") if size])
        )


def measure(folder: Path, runs: int, size: float, curve: list[float]) -> int:
    terminal.show(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.machine()}, {folder}")
    goals: list[tuple[str, str, str, bool]] = []

    write_pair(folder / "plan", EXPERTS, 512, BLOCK, data=False)
    plans = [child("plan", folder / "plan") for _ in range(runs)]
    seconds = statistics.median(plan["seconds"] for plan in plans)
    memory = max(plan["memory"] for plan in plans)
    goals.append(("plan of 113,000 tensors", f"{seconds:.2f} s", f"{GOAL_PLAN} s", seconds < GOAL_PLAN))
    goals.append(
        (
            "peak memory of planning it",
            terminal.size(int(memory)),
            terminal.size(int(GOAL_MEMORY)),
            memory < GOAL_MEMORY,
        )
    )
    (folder / "fetch/hub").mkdir(parents=True)
    (folder / "plan").rename(folder / "fetch/hub/bench")
    fetched = child("fetch", folder / "fetch")
    share = fetched["sent"] / fetched["needed"]
    terminal.show(
        f"locking it over HTTP: {terminal.size(int(fetched['sent']))} sent, "
        f"{terminal.size(int(fetched['needed']))} needed, "
        f"of {terminal.size(int(fetched['total']))} of both repositories, in {fetched['seconds']:.1f} s"
    )
    goals.append(("bytes fetched, of those needed", f"{share:.4f}", f"{GOAL_FETCH}", share <= GOAL_FETCH))
    shutil.rmtree(folder / "fetch")

    terminal.show(f"\n{size:g} GB, {runs} runs each")
    result = compare(folder / "main", size, runs)
    shutil.rmtree(folder / "main")
    for state, goal in GOAL_SPEED.items():
        share = result[f"invoke build --checkpoint-only, {state}"]
        goals.append((f"whole command, of cp, {state}", f"{share:.2f}", f"{goal}", share >= goal))
    memory = result["memory"]
    goals.append(
        (
            "peak memory of the whole command",
            terminal.size(int(memory)),
            terminal.size(int(GOAL_MEMORY)),
            memory < GOAL_MEMORY,
        )
    )

    points = []
    for gigabytes in curve:
        found = compare(folder / "curve", gigabytes, 1)
        shutil.rmtree(folder / "curve")
        ratios = [f"{found[f'invoke build --checkpoint-only, {state}']:.2f}" for state in ("warm", "cold")]
        points.append((f"{gigabytes:g} GB", *ratios, terminal.size(int(found["memory"]))))
    if points:
        terminal.table(("base", "of cp, warm", "of cp, cold", "peak memory"), points)
    terminal.table(("what", "measured", "goal", "met"), [(*goal[:3], "yes" if goal[3] else "NO") for goal in goals])
    return 0 if all(goal[3] for goal in goals) else 1


if __name__ == "__main__":
    main()

"""How long a server takes to start with a large checkpoint on disk, by loader: `loaders.py make|time FOLDER`.

For one NVIDIA GPU with vLLM; `time` must run as root, to empty the page cache. `make` writes a dense model in BF16 with
random weights, in files of two layers. `time` reads the files without vLLM (the disk's speed), then starts `vllm serve`
once for each loader and page cache: seconds until it answers, of them those for weights, as `invoke bench` tells them.
Before each start the page cache is emptied or, for `warm`, filled with the files; how fast they are read from there is
measured once. The first start compiles, from an emptied cache unless `--cache warm` is all that is asked for.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sparkpin.smoke.startup import Startup

WIDE, INNER, HEADS, KV_HEADS, HEAD, WORDS = 8192, 28672, 32, 4, 256, 32768
SHAPES = {
    "self_attn.q_proj": (WIDE, WIDE),
    "self_attn.k_proj": (KV_HEADS * HEAD, WIDE),
    "self_attn.v_proj": (KV_HEADS * HEAD, WIDE),
    "self_attn.o_proj": (WIDE, WIDE),
    "mlp.gate_proj": (INNER, WIDE),
    "mlp.up_proj": (INNER, WIDE),
    "mlp.down_proj": (WIDE, INNER),
    "input_layernorm": (WIDE,),
    "post_attention_layernorm": (WIDE,),
}
ENDS = {"model.embed_tokens": (WORDS, WIDE), "lm_head": (WORDS, WIDE), "model.norm": (WIDE,)}
A_FILE = 2  # layers
CHUNK = 16 << 20  # bytes of a read
READERS = (1, 4, 16)
SMALL = 0xBC7F  # of a BF16 value's bits: its magnitude stays below 1/64
LOADERS: dict[str, list[str]] = {
    "auto": [],
    "prefetch": ["--safetensors-load-strategy", "prefetch"],
    "fastsafetensors": ["--load-format", "fastsafetensors"],
    "instanttensor": ["--load-format", "instanttensor"],
}
COMPILE, CACHES = "compile", ("cold", "warm")
LIMIT = 200.0  # seconds of one start
PORT = 8123


def config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": WIDE,
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
        "num_hidden_layers": layers, "vocab_size": WORDS, "max_position_embeddings": 8192, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def write(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file

    made = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        bits = made.integers(0, 1 << 16, size=int(np.prod(shape)), dtype=np.uint16) & SMALL
        tensors[f"{name}.weight"] = torch.from_numpy(bits).view(torch.bfloat16).view(shape)
    save_file(tensors, path, {"format": "pt"})


def make(folder: Path, gigabytes: float) -> None:
    a_layer = 2 * sum(rows * (shape[0] if shape else 1) for rows, *shape in SHAPES.values())
    layers = round(gigabytes * 1e9 / a_layer / A_FILE) * A_FILE
    parts: list[dict[str, tuple[int, ...]]] = [ENDS]
    for first in range(0, layers, A_FILE):
        numbers = range(first, first + A_FILE)
        parts.append({f"model.layers.{n}.{name}": shape for n in numbers for name, shape in SHAPES.items()})
    names = [f"model-{at + 1:05}-of-{len(parts):05}.safetensors" for at in range(len(parts))]
    folder.mkdir(parents=True)
    with multiprocessing.Pool(6) as pool:
        pool.starmap(
            write, [(folder / name, part, at) for at, (name, part) in enumerate(zip(names, parts, strict=True))]
        )
    places = {f"{key}.weight": name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(config(layers)))
    print(f"{layers} layers, {size_of(folder) / 1e9:.1f} GB", flush=True)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


def forget() -> None:
    """Empty the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def fill(folder: Path) -> None:
    """Have the files in the page cache, as far as there is memory for them."""
    subprocess.run(["cat", *files_of(folder)], stdout=subprocess.DEVNULL, check=True)


def read(path: Path, *, direct: bool) -> int:
    """Bytes of a file. direct: past the page cache, but for its last part."""
    import mmap

    buffer, total = mmap.mmap(-1, CHUNK), 0  # page-aligned, as O_DIRECT wants it
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        while count := os.readv(descriptor, [buffer]):
            total += count
            if direct and count % 4096:
                break
    finally:
        os.close(descriptor)
    return total


def speeds(folder: Path, *, direct: bool) -> dict[int, float]:
    """Bytes per second by how many files are read at once. direct: from the disk, else from where they are."""
    found = {}
    for readers in READERS:
        if direct:
            forget()
        begin = time.monotonic()
        with ThreadPoolExecutor(readers) as pool:
            total = sum(pool.map(partial(read, direct=direct), files_of(folder)))
        found[readers] = total / (time.monotonic() - begin)
        print("DISK" if direct else "MEMORY", readers, f"{found[readers] / 1e9:.2f} GB/s", flush=True)
    return found


def starts(caches: Sequence[str]) -> list[tuple[str, str]]:
    """Loader and page cache. The first start compiles; all others find the compiled model of the first one."""
    return [("auto", COMPILE), *((name, cache) for cache in CACHES if cache in caches for name in LOADERS)]


def answer() -> bool:
    body = json.dumps({"model": "m", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}).encode()
    asked = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def start(folder: Path, loader: str, tokenizer: Path, log: Path) -> dict[str, Any]:
    """Seconds to the first token, by parts."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--served-model-name", "m", "--host",
        "127.0.0.1", "--port", str(PORT), "--tokenizer", str(tokenizer), "--max-model-len", "4096", "--max-num-seqs",
        "16", "--gpu-memory-utilization", "0.9", *LOADERS[loader],
    ]  # fmt: skip
    if answer():
        return {"error": f"another server answers on port {PORT}"}
    begin, startup = time.monotonic(), Startup()
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        while not answer():
            seconds = time.monotonic() - begin
            startup.update(log.read_bytes(), seconds)
            if server.poll() is not None or seconds > LIMIT:
                errors = re.findall(r"\w+(?:Error|Exception): .*", log.read_text(errors="replace"))
                return {"error": (errors or ["not ready in time"])[-1][:300]}
            time.sleep(0.2)
        seconds = time.monotonic() - begin
        startup.update(log.read_bytes(), seconds)
        took = re.findall(r"Loading weights took ([\d.]+) seconds", log.read_text(errors="replace"))
        weights = round(sum(map(float, took)), 2) if took else None
        return {"first_token_s": round(seconds, 1), "weights_s": weights, "began": startup.began}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        time.sleep(2)  # the GPU's memory


def timed(folder: Path, tokenizer: Path, out: Path, until: float, caches: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    cold = "cold" in caches
    found: dict[str, Any] = {
        "bytes": size_of(folder),
        "files": len(files_of(folder)),
        "disk": speeds(folder, direct=True) if cold else {},
        "memory": {},
        "starts": [],
    }
    for loader, cache in starts(caches):
        if time.monotonic() + LIMIT / 3 > until:
            print("no time:", loader, cache, flush=True)
            continue
        warm = cache == "warm" or not cold
        if warm:
            fill(folder)
            found["memory"] = found["memory"] or speeds(folder, direct=False)
        else:
            forget()
        row = {"loader": loader, "cache": cache, **start(folder, loader, tokenizer, out / f"{loader}-{cache}.log")}
        if (seconds := row.get("weights_s")) and not warm:
            row["share_of_disk"] = found["bytes"] / seconds / max(found["disk"].values())
        found["starts"].append(row)
        print("START", row, flush=True)
        (out / "loaders.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a server ends, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=("make", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=3600, help="for all starts")
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=CACHES, help="of starts after the first (both)")
    parser.add_argument("--tokenizer", type=Path, help="a folder that has one, of any model: none is made")
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    if given.act == "make":
        make(given.folder, given.gb)
    elif given.tokenizer is None:
        parser.error("time: --tokenizer is wanted")
    else:
        timed(given.folder, given.tokenizer, given.out, time.monotonic() + given.seconds, given.cache)

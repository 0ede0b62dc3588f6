"""Start real vLLM servers with the scripted model on a CUDA machine, ask them what they must know, write what was seen.

Runs in the folder that prepare.py made, with its site unpacked on PYTHONPATH. All named configurations run at once, on
one GPU: the model is small. Each gets the same bytes for its KV cache, so the numbers of tokens that vLLM reports can
be compared. OUT/NAME.log and OUT/results.json; the standard library only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CASES = HERE / "cases.json"
READY_S, ASK_S = int(os.environ.get("READY_S", "240")), 60
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
COMPILED = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}
MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":2}']
OFF = {"SPARKPIN_MOD_TURBOQUANT": "0", "SPARKPIN_MOD_INT8_LM_HEAD": "0"}
LISTED = [
    "--speculative-config", '{"method":"mtp","num_speculative_tokens":2,"use_local_argmax_reduction":true}',
    "--additional-config", '{"draft_vocabulary":{"first":300}}',
]  # fmt: skip
"""Most of what the scripted model says is not listed: the same answers, though hardly a draft is right."""
COMMON = {
    "SPARKPIN_MOD_DRAFT_VOCABULARY": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def cache(kind: str) -> list[str]:
    return ["--kv-cache-dtype", f"turboquant_{kind}"]


CONFIGURATIONS: dict[str, tuple[list[str], dict[str, str], dict[str, Any]]] = {
    "bf16": ([], OFF, GRAPHS),
    "bf16-mtp": (MTP, OFF, GRAPHS),
    "head-mtp": (MTP, {}, GRAPHS),
    "head-vocab": (LISTED, {"SPARKPIN_MOD_DRAFT_VOCABULARY": "1"}, GRAPHS),
    "vocab": (LISTED, OFF | {"SPARKPIN_MOD_DRAFT_VOCABULARY": "1"}, GRAPHS),
    "4bit": (cache("4bit_nc"), {}, GRAPHS),
    "4bit-mtp": ([*cache("4bit_nc"), *MTP], {}, GRAPHS),
    "4bit-match": ([*cache("4bit_nc"), *MTP, "--prefix-match-unit", "32"], {}, GRAPHS),
    "k8v4-mtp": ([*cache("k8v4"), *MTP], {}, GRAPHS),
    "4bit-mtp-compiled": ([*cache("4bit_nc"), *MTP], {}, COMPILED),
}


class Server:
    def __init__(self, name: str, port: int, out: Path) -> None:
        arguments, environment, compilation = CONFIGURATIONS[name]
        self.log, self.port = out / f"{name}.log", port
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(HERE / "model")]
        command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--seed", "0"]
        command += ["--max-model-len", "40960", "--max-num-seqs", "16", "--max-num-batched-tokens", "2048"]
        command += ["--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.05"]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--gdn-prefill-backend", "triton"]
        command += ["--max-logprobs", "20", "--compilation-config", json.dumps(compilation), *arguments]
        folders = {"VLLM_CACHE_ROOT": f"/tmp/vllm-{name}", "TRITON_CACHE_DIR": f"/tmp/triton-{name}"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **COMMON, **folders, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps({"model": "m", "temperature": 0, **body}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ASK_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read()[:500]!r}") from error

    def wait(self) -> float:
        begin = time.monotonic()
        while time.monotonic() - begin < READY_S:
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with status {self.process.returncode}")
            try:
                self.call("/health")
                return time.monotonic() - begin
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"not ready after {READY_S} s")

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def complete(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    return json.loads(server.call("/v1/completions", {"prompt": prompt, "max_tokens": 400, **more}))  # type: ignore[no-any-return]


def ask(server: Server) -> dict[str, Any]:
    """Every case in turn; a case that fails says how, the others go on."""
    cases = json.loads(CASES.read_text())
    seen: dict[str, Any] = {}

    def case(name: str, run: Any) -> None:
        begin = time.monotonic()
        try:
            seen[name] = run()
        except Exception as error:
            seen[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"[:400]}
        seen[name]["s"] = round(time.monotonic() - begin, 3)

    def needle(tokens: int, more: dict[str, Any] | None = None) -> dict[str, Any]:
        found = complete(server, cases["needles"][str(tokens)], **(more or {}))
        text = found["choices"][0]["text"]
        details = found["usage"].get("prompt_tokens_details") or {}
        right = text == cases["content"]
        return {"ok": right, "cached": details.get("cached_tokens"), **({} if right else {"text": text[:200]})}

    def chat(word: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": word}], "max_tokens": 400}
        text = json.loads(server.call("/v1/chat/completions", body))["choices"][0]["message"]["content"]
        return {
            "ok": text == cases["chats"][word],
            **({} if text == cases["chats"][word] else {"text": str(text)[:200]}),
        }

    def together() -> dict[str, Any]:
        jobs = [(needle, int(n)) for n in cases["needles"]] + [(chat, word) for word in cases["chats"]] * 4
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            found = list(pool.map(lambda job: job[0](job[1]), jobs))
        return {"ok": all(one["ok"] for one in found), "requests": len(jobs), "right": sum(one["ok"] for one in found)}

    def logprobs() -> dict[str, Any]:
        prompt = cases["needles"]["200"]
        found = complete(server, prompt, max_tokens=8, logprobs=5)["choices"][0]["logprobs"]
        asked = complete(server, prompt, max_tokens=1, prompt_logprobs=3)["choices"][0]["prompt_logprobs"]
        values = [*found["token_logprobs"], *(x["logprob"] for at in asked[1:] for x in at.values())]
        right = (
            len(found["top_logprobs"][0]) >= 5 and len(asked) == len(prompt) and all(-1e4 < v <= 1e-4 for v in values)
        )
        return {"ok": right, "first": found["token_logprobs"][:3], "values": len(values)}

    for word in cases["chats"]:
        case(f"chat {word}", lambda word=word: chat(word))
    for tokens in cases["needles"]:
        case(f"needle {tokens}", lambda tokens=tokens: needle(int(tokens)))
    longest = max(map(int, cases["needles"]))
    case("needle again", lambda: needle(longest))
    case("together", together)
    case("logprobs", logprobs)
    case("after", lambda: chat("hello"))
    return seen


def read_log(text: str) -> dict[str, Any]:
    reports = [json.loads(line.split("SPARKPIN_MOD ", 1)[1]) for line in text.splitlines() if "SPARKPIN_MOD {" in line]
    size = re.findall(r"KV cache size: ([\d,]+) tokens", text)
    return {
        "tokens": int(size[-1].replace(",", "")) if size else None,
        "mods": [report for report in reports if report["event"] != "kernels"],
        "lines": [
            line[-300:]
            for line in text.splitlines()
            if re.search(
                r"attention backend|block size|Padding mamba|raph captur|Capturing|cudagraph|runner|Error", line
            )
        ][:40],
    }


def one(name: str, port: int, out: Path) -> dict[str, Any]:
    server = Server(name, port, out)
    found: dict[str, Any] = {}
    try:
        found["ready_s"] = round(server.wait(), 1)
        found["cases"] = ask(server)
        metrics = server.call("/metrics")
        found["metrics"] = {
            match[1]: float(match[2])
            for match in re.finditer(
                r"^vllm:((?:spec_decode_num|prefix_cache)_\w+_total)\{[^}]*\} (\S+)", metrics, re.M
            )
        }
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        server.stop()
    text = server.log.read_text(errors="replace")
    if "error" in found:
        found["tail"] = text[-3000:]
    return found | read_log(text)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"names: {', '.join(CONFIGURATIONS)}\n\n"
        "in the environment: READY_S, seconds after which a server that is not ready is given up; 240 if not given.\n"
        "Eight servers with empty caches want 330. The end of its log is then in results.json.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder for logs and results")
    parser.add_argument("names", metavar="NAME", nargs="*", default=list(CONFIGURATIONS), help="configurations (all)")
    given = parser.parse_args(arguments)
    out, names = given.out, given.names
    if wrong := [name for name in names if name not in CONFIGURATIONS]:
        parser.error(f"{wrong[0]}: expected names of {', '.join(CONFIGURATIONS)}")
    if not CASES.is_file():
        parser.error(f"{HERE} has no {CASES.name}: run run.py in the folder that prepare.py made")
    out.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        jobs = {name: pool.submit(one, name, 8100 + i, out) for i, name in enumerate(names)}
        results = {name: job.result() for name, job in jobs.items()}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    for name, found in results.items():
        cases = found.get("cases", {})
        wrong = [case for case, seen in cases.items() if not seen["ok"]]
        print(
            name,
            found.get("ready_s"),
            "s;",
            found["tokens"],
            "tokens;",
            f"{len(cases) - len(wrong)} of {len(cases)} right;",
            wrong,
        )
        print("   ", found.get("metrics"), found.get("error", ""))


if __name__ == "__main__":
    main(sys.argv[1:])

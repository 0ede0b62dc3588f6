"""Settings that are known to break, with where that is known from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from sparkpin.community.finding import RecipeFinding, error, note, warning
from sparkpin.community.flag_lint import PlannedServer
from sparkpin.pins import cache_types
from sparkpin.pins.nodes import PIPELINE, TENSOR, nodes_of
from sparkpin.pins.vllm_command import tls_flags

HYBRID = re.compile(r"qwen3\.[5-9]|qwen3-(coder-)?next|nemotron-(3|h)|granite-4|jamba|falcon-h1|mamba", re.IGNORECASE)
"""Models with linear attention or state-space layers beside full attention."""
LOADERS = {"fastsafetensors": "fastsafetensors", "instanttensor": "instanttensor",
           "runai_streamer": "runai-model-streamer", "tensorizer": "tensorizer"}  # fmt: skip
PARALLEL = (TENSOR, PIPELINE, "--data-parallel-size")
PARSER = "0.24"  # about here tool calls got one streaming parser
MUCH = 0.85  # of memory that the host needs a part of
MANY_TOKENS = 32768


def findings(served: PlannedServer) -> Iterator[RecipeFinding]:
    yield from speculation(served)
    yield from thinking(served)
    yield from memory(served)
    yield from machine(served)
    if served.value("--trust-remote-code") is not None:
        hint = "leave it out where vLLM has the model itself (eugr/spark-vllm-docker#199)"
        yield note("--trust-remote-code runs Python of the model's repository", hint)


def speculation(served: PlannedServer) -> Iterator[RecipeFinding]:
    plan = served.speculation
    if not plan:
        return
    hybrid = HYBRID.search(served.model)
    if hybrid and "mtp" in str(plan.get("method", "")) and served.value("--enable-prefix-caching") is not None:
        text = "prefix caching with MTP has corrupted the output of models such as this one (vllm#47194, #53912: still "
        yield warning(f"{text}open for 0.28, nothing known of later ones)", "leave one of the two out")
    tokens = plan.get("num_speculative_tokens")
    parses = served.value("--enable-auto-tool-choice") is not None
    if parses and isinstance(tokens, int) and tokens > 1 and older(served.release.wanted, PARSER):
        text = f"{tokens} speculative tokens lose parts of tool calls before vLLM {PARSER} (vllm#35421)"
        yield warning(text, "num_speculative_tokens: 1")
    draft = plan.get("model")
    if isinstance(draft, str) and not draft.startswith("/model"):
        text = f"the draft model {draft} is not fetched, and a container has no network"
        yield error(text, f"pin it and write `drafter: {draft}` (docs/drafters.md), or leave --speculative-config out")


def thinking(served: PlannedServer) -> Iterator[RecipeFinding]:
    reasons, calls = served.value("--reasoning-parser"), served.value("--enable-auto-tool-choice")
    if reasons == "qwen3" and calls is not None and older(served.release.wanted, PARSER):
        text = f"tool calls that begin inside <think> are lost before vLLM {PARSER} (vllm#39056)"
        yield note(text, "serve agents with a newer vLLM")


def memory(served: PlannedServer) -> Iterator[RecipeFinding]:
    share = served.number("--gpu-memory-utilization")
    if served.gpu and share is not None and share > MUCH:
        text = f"--gpu-memory-utilization {share:g}: the host shares that memory, and profiling takes more than the "
        yield warning(f"{text}share (vllm#46307): it has frozen machines", f"{MUCH} or less")
    if served.value("--load-format") == "fastsafetensors":
        yield note("fastsafetensors holds a part of the weights twice while it loads: with 78 GB of them a Spark froze")
    tokens = served.number("--max-num-batched-tokens")
    if served.gpu and tokens is not None and tokens >= MANY_TOKENS:
        text = f"--max-num-batched-tokens {tokens:.0f} has run out of memory on a saturated Spark"
        yield note(text, "16384 served all day")


def machine(served: PlannedServer) -> Iterator[RecipeFinding]:
    for flag in PARALLEL if nodes_of(served.argv) == 1 else ():
        if (count := served.number(flag)) is not None and count > 1:
            yield error(f"{flag} {count:.0f}: one machine has one GPU here", f"{flag} 1, or the key `nodes`")
    loader = served.value("--load-format") or ""
    wanted = [(LOADERS[loader], f"--load-format {loader}")] if loader in LOADERS else []
    if served.value("--distributed-executor-backend") == "ray":
        wanted.append(("ray", "--distributed-executor-backend ray"))
    for package, flag in wanted:
        if served.packages is not None and package not in served.packages:
            yield error(f"{flag}: the stack's lock has no {package}", "leave the flag out")
    for flag in tls_flags(served.argv):
        text = f"{flag}: the images here are asked by plain HTTP, so `recipe import` leaves it out"
        yield warning(text, "a proxy before the server can do TLS")
    if served.chain and (text := cache_types.without_mod(served.value(cache_types.FLAG), served.chain)):
        yield warning(text, f"stage {cache_types.STAGE} has it; else leave the flag out")
    if not served.gpu and served.value("--enable-prefix-caching") is not None:
        text = "--enable-prefix-caching on a CPU: ready, and then an error for each request of a hybrid model"
        yield warning(text, "--no-enable-prefix-caching")


def older(version: str, than: str) -> bool:
    try:
        return Version(version) < Version(than)
    except InvalidVersion:
        return False

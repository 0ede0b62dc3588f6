"""Hostile and odd requests, as data: each is sent to a real server, with a control request beside it.

`kills` names what a bare server of that vLLM does with it: "0.32 ..." ends the engine, "stalls 0.32 ..." keeps others
waiting for more than two seconds. Nothing where it answers, or refuses by itself.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
from sparkpin_guard.rows import fault, rows

from benchmarks.scripted_tiny.scripts import WEATHER_TOOL

CHAT, COMPLETE, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = [{"role": "user", "content": "What is the weather?"}]
MODEL = "scripted-tiny"
TABLE = rows(4)  # its recipe's --max-num-seqs
RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass(frozen=True)
class Trial:
    name: str
    path: str
    body: dict[str, Any] | bytes
    kills: str = ""

    @property
    def patience(self) -> float:
        """Seconds after which the client goes away."""
        return 30 if self.kills else 3

    @property
    def must_be_refused(self) -> bool:
        """By mods/guard; the others that kill, mods/vllm-cpu mends."""
        return bool(self.kills) and "the mod" not in self.kills

    @property
    def content(self) -> bytes:
        """The body's bytes. NaN and lone surrogates are written as Python writes them: that is the trial."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def chat(name: str, kills: str = "", **more: Any) -> Trial:
    return Trial(name, CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 16, "temperature": 0, **more}, kills)


def text(name: str, kills: str = "", **more: Any) -> Trial:
    return Trial(name, COMPLETE, {"model": MODEL, "prompt": "m", "max_tokens": 16, "temperature": 0, **more}, kills)


def to(name: str, path: str, kills: str = "", **body: Any) -> Trial:
    return Trial(name, path, {"model": MODEL, **body}, kills)


def picture(url: str, kind: str = "image_url") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": kind, kind: {"url": url}}]}]


def generate(name: str, ids: list[int] | None = None, kills: str = "", **sampling: Any) -> Trial:
    """Tokens in, tokens out: how they are drawn lies one level deeper."""
    sampling = {"max_tokens": 16, "temperature": 0, **sampling}
    return to(name, "/inference/v1/generate", kills, token_ids=ids or [5, 6, 7], sampling_params=sampling)


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}


def nested(depth: int) -> bytes:
    return b'{"model": "scripted-tiny", "messages": ' + b"[" * depth + b"]" * depth + b"}"


def deep_schema(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    return value


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def branching(depth: int) -> dict[str, Any]:
    """A schema whose grammar grows faster than exponentially (vllm-project/vllm#54003)."""
    value: dict[str, Any] = {"type": "string"}
    for number in range(depth):
        value = {"oneOf": [{"type": "object", "properties": {f"{key}{number}": value}} for key in "abc"]}
    return value


def raw(name: str, content: bytes, kills: str = "", path: str = CHAT) -> Trial:
    return Trial(name, path, content, kills)


TOOLS = {"messages": WEATHER, "tools": [WEATHER_TOOL], "max_tokens": 200}
MANY_TOOLS = [{**WEATHER_TOOL, "function": {**WEATHER_TOOL["function"], "name": f"tool_{i}"}} for i in range(1000)]
SHORT = "0.32 on a CPU with MTP, without the mod vllm-cpu: a draft is shorter than the others"
SCORING = "0.32 with drafts: vllm-project/vllm#42592"
COMPILES = "stalls 0.32: compiled on all cores for more than 10 s"
ONE = "0.32 on a CPU with AVX512-BF16 without drafts, without the mod vllm-cpu"
QUEUE = "stalls 0.32: it holds every sequence, more than 30 s"
V2 = "0.33 on an H200: its V2 model runner has a table with fewer places"
ASKED = {"type": "predicate", "instructions": "m"}
END = {"model": MODEL, "prompt": [5] * 900, "max_tokens": 1148, "temperature": 0, "ignore_eos": True}
WIDE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "enum": [f"v{j}" for j in range(40)]} for i in range(400)},
}

TRIALS = (
    # grammars
    chat("tool-required", kills=SHORT, **TOOLS, tool_choice="required"),
    chat("tool-named", kills=SHORT, **TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}),
    chat("json-schema", kills=SHORT, response_format=schema(CITY), max_tokens=60),
    chat("json-object", kills=SHORT, response_format={"type": "json_object"}, max_tokens=60),
    chat("schema-recursive", response_format=schema(RECURSIVE), max_tokens=60),
    chat("schema-deep", response_format=schema(deep_schema(200)), max_tokens=60),
    chat("schema-wide", response_format=schema(WIDE), max_tokens=60),
    chat("schema-branching", response_format=schema(branching(4))),
    chat("schema-branching-8", kills=COMPILES, response_format=schema(branching(8))),
    chat("tools-forced-branching-8", kills=COMPILES, tool_choice="required", tools=[tool(branching(8))]),
    chat("tools-free-branching-4", tools=[tool(branching(4))]),
    chat(
        "schema-bounds",
        response_format=schema({"type": "array", "items": CITY, "minItems": 100000, "maxItems": 1000000}),
    ),
    chat("schema-pattern", response_format=schema({"type": "string", "pattern": "^(((a+)+)+)+$"})),
    chat("schema-remote-ref", response_format=schema({"$ref": "http://169.254.169.254/schema.json"})),
    chat("grammar-broken", structured_outputs={"grammar": "root ::= ("}),
    chat("grammar-loop", structured_outputs={"grammar": "root ::= root"}),
    chat("grammar-empty-loop", structured_outputs={"grammar": 'root ::= (("")*)*'}),
    chat(
        "grammar-megabyte",
        kills=COMPILES,
        structured_outputs={"grammar": "root ::= " + " | ".join(f'"w{i}"' for i in range(100000))},
    ),
    chat("regex-repeats", structured_outputs={"regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"}),
    chat("regex-broken", structured_outputs={"regex": "(("}),
    chat(
        "structural-tag",
        response_format={
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "schema": CITY, "end": "</a>"}],
            "triggers": ["<a"],
        },
    ),
    # counts
    text("n-5000", kills=QUEUE, n=5000, temperature=1),
    text("n-2**31", n=2**31),
    text("n-100", kills=QUEUE, n=100, temperature=1, max_tokens=200, ignore_eos=True),
    text("n-100-as-text", kills=QUEUE, n="100", temperature=1, max_tokens=200, ignore_eos=True),
    text("n-100-as-a-float", kills=QUEUE, n=100.0, temperature=1, max_tokens=200, ignore_eos=True),
    text("prompts-5000", prompt=["m"] * 5000),
    # log-probabilities
    text("logprobs-huge", logprobs=2**31),
    text("logprobs-minus-one", logprobs=-1),
    chat("top-logprobs-huge", logprobs=True, top_logprobs=10**6),
    text("prompt-logprobs", prompt_logprobs=-1, prompt="m " * 900),
    text("prompt-logprobs-huge", prompt_logprobs=10**9),
    text("prompt-logprobs-stream", prompt_logprobs=1, stream=True),
    text("logprob-token-ids", kills=SCORING, logprobs=2, logprob_token_ids=[5, 6]),
    chat("logprob-token-ids-chat", kills=SCORING, logprobs=True, top_logprobs=2, logprob_token_ids=[5]),
    text("prompt-logprobs-20", prompt_logprobs=20, prompt="m" * 1900, logprobs=20),
    # numbers
    chat("temperature-1e308", temperature=1e308),
    chat("temperature-negative", temperature=-1),
    chat("temperature-nan", temperature=float("nan")),
    chat("penalty-tiny", repetition_penalty=1e-300, temperature=1),
    chat("penalty-huge", repetition_penalty=1e300, temperature=1),
    chat("top-p-zero", top_p=0),
    chat("top-k-2**70", top_k=2**70, temperature=1),
    chat("min-p-nan", min_p=float("nan"), temperature=1),
    chat("max-tokens-zero", max_tokens=0),
    chat("max-tokens-2**63", max_tokens=2**63),
    chat("min-tokens-over-max", min_tokens=100, max_tokens=5),
    chat("seed-2**80", seed=2**80, temperature=1),
    chat("priority", priority=-(2**63)),
    chat("thinking-budget-huge", thinking_token_budget=2**70),
    Trial("to-the-context-s-end", COMPLETE, END, SHORT),
    text("n-2", n=2, temperature=1, max_tokens=1000, ignore_eos=True),
    text("n-3", n=3, temperature=1, max_tokens=1000, ignore_eos=True),
    text("prompts-100", kills=QUEUE, prompt=["m"] * 100, max_tokens=200, ignore_eos=True),
    text("allowed-ids-one", allowed_token_ids=[5], max_tokens=60),
    text("bad-words-few", bad_words=["a", "pinned build", " "], max_tokens=60),
    chat("penalties", frequency_penalty=2, presence_penalty=-2, repetition_penalty=1.5, temperature=2, max_tokens=60),
    chat("thinking-budget-5", thinking_token_budget=5, max_tokens=60),
    text("return-everything", return_token_ids=True, return_tokens_as_token_ids=True, logprobs=3, echo=True),
    text("truncate-one", truncate_prompt_tokens=1, prompt="m" * 500),
    text("stop-huge", stop=["x" * 500_000, "y" * 500_000], include_stop_str_in_output=True),
    # numbers within other values: answered 500 at most
    text("xargs-2**70", vllm_xargs={"a": 2**70}),
    chat("template-kwargs-2**70", chat_template_kwargs={"a": 2**70, "b": float("nan")}),
    chat("repetition-2**70", repetition_detection={"max_pattern_size": 2**70, "min_pattern_size": 1, "min_count": 2}),
    chat("tool-with-a-bound-of-2**70", tools=[tool({"type": "integer", "maximum": 2**70, "default": float("nan")})]),
    # token ids
    text("prompt-empty", prompt=""),
    text("prompt-no-tokens", prompt=[]),
    text("prompt-one-token-one-asked", kills=ONE, prompt=[5], max_tokens=1),
    text("prompt-id-out-of-range", prompt=[10**6, 5]),
    text("prompt-too-long", prompt=[5] * 100000),
    text("prompt-embeds", prompt_embeds=base64.b64encode(b"\x80\x04garbage" * 100).decode()),
    text("logit-bias", logit_bias={"1000000": 1.0}),
    text("stop-ids", stop_token_ids=[10**9, -1]),
    text("allowed-ids-1100", kills=V2, allowed_token_ids=list(range(500, 600)) * 11),
    text("stop-ids-200", stop_token_ids=list(range(500, 700))),
    text("stop-ids-128-and-the-end", kills=V2, stop_token_ids=list(range(300, 428)), min_tokens=5),
    text("stop-ids-200-and-the-end", kills=V2, stop_token_ids=list(range(500, 700)), min_tokens=5),
    text("bad-word-long", kills=V2, bad_words=["a pinned build " * 400]),
    text("allowed-ids", allowed_token_ids=[10**9]),
    text("allowed-ids-none", allowed_token_ids=[]),
    text("bad-words-many", bad_words=[f"w{i}" for i in range(5000)]),
    text("bad-words-empty", bad_words=[""]),
    text("stop-many", stop=[f"s{i}" for i in range(10000)], max_tokens=60),
    text("stop-empty", stop=[""]),
    text("truncate", truncate_prompt_tokens=-5),
    text("truncate-huge", truncate_prompt_tokens=2**40),
    # messages and templates
    chat("messages-none", messages=[]),
    chat("messages-10000", messages=HELLO * 10000),
    chat("tools-20000", messages=WEATHER, tools=MANY_TOOLS * 20),
    chat("tools-1000", messages=WEATHER, tools=MANY_TOOLS),
    chat("role-unknown", messages=[{"role": "\u0000", "content": "x"}]),
    chat("content-number", messages=[{"role": "user", "content": 5}]),
    chat("surrogate", messages=[{"role": "user", "content": "\ud800"}]),
    chat("nul", messages=[{"role": "user", "content": "a\u0000b"}]),
    chat("one-megabyte", messages=[{"role": "user", "content": "a" * 1_000_000}]),
    text("one-megabyte-prompt", prompt="a" * 1_000_000),
    to("one-megabyte-tokenize", "/tokenize", prompt="ab" * 500_000),
    chat("ten-megabytes", messages=[{"role": "user", "content": "ab " * 3_500_000}]),
    text("ten-megabytes-prompt", prompt="ab " * 3_500_000),
    to("ten-megabytes-tokenize", "/tokenize", kills="stalls 0.32: 22 s", prompt="ab " * 3_500_000),
    chat("template", chat_template="{% for i in range(10**9) %}x{% endfor %}"),
    chat("template-kwargs", chat_template_kwargs={"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}),
    chat("documents", documents=[{"title": "x", "text": "y" * 100000}] * 20),
    # media
    chat("image-file", messages=picture("file:///etc/passwd")),
    chat("image-metadata", messages=picture("http://169.254.169.254/latest/meta-data")),
    chat("image-garbage", messages=picture("data:image/png;base64,AAAA")),
    chat("audio-garbage", messages=picture("data:audio/wav;base64,AAAA", "audio_url")),
    # beams, and what 0.33 has of its own
    chat("beams", use_beam_search=True, n=3, max_tokens=200),
    text("beams-long", kills="stalls 0.32 on a CPU: 4 s", use_beam_search=True, n=3, prompt="m" * 1500, max_tokens=400),
    text("beams-allowed-ids", use_beam_search=True, n=2, allowed_token_ids=[5, 6]),
    chat("beams-of-a-grammar", use_beam_search=True, n=2, response_format=schema(CITY)),
    chat("beams-length-nan", use_beam_search=True, n=2, length_penalty=-1e308),
    chat("weight-versions", return_weight_versions=True, stream=True),
    chat("watermarking", watermarking=True),
    chat("effort", reasoning_effort="max"),
    chat("processor", mm_processor_kwargs={"max_pixels": 2**62, "size": {"height": -1}}),
    # others' knobs
    text(
        "kv-transfer",
        kv_transfer_params={"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1"},
    ),
    chat("cache-salt", cache_salt=""),
    text("echo", echo=True, max_tokens=0, logprobs=5),
    chat(
        "stream-n",
        stream=True,
        n=20,
        temperature=1,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    chat("request-id-newline", request_id="a\nb" * 10000),
    chat("model-unknown", model="../../etc/passwd"),
    chat(
        "repetition-detection", repetition_detection={"max_pattern_size": 10**9, "min_pattern_size": 1, "min_count": 2}
    ),
    # bytes that are no request
    raw("depth-10000", nested(10_000)),
    raw(
        "depth-900",
        b'{"model": "scripted-tiny", "messages": [{"role": "user", "content": "Hello"}], "metadata": '
        + b'{"a":' * 900
        + b"1"
        + b"}" * 900
        + b"}",
    ),
    raw("a-number", b"5"),
    raw("digits-5000", b'{"model": "scripted-tiny", "prompt": "m", "max_tokens": ' + b"9" * 5000 + b"}", path=COMPLETE),
    raw("utf-16", json.dumps({"model": MODEL, "prompt": "m"}).encode("utf-16"), path=COMPLETE),
    raw("same-key-twice", b'{"model": "scripted-tiny", "prompt": "m", "n": 1, "n": 5000}', path=COMPLETE),
    raw(
        "keys-200000",
        json.dumps({"model": MODEL, "prompt": "m", **{f"k{i}": 1 for i in range(200_000)}}).encode(),
        path=COMPLETE,
    ),
    # other paths
    to(
        "messages-api-tool",
        MESSAGES,
        kills=SHORT,
        messages=WEATHER,
        max_tokens=200,
        tool_choice={"type": "any"},
        tools=[{"name": "get_weather", "input_schema": CITY}],
    ),
    to("messages-api-negative", MESSAGES, messages=HELLO, max_tokens=-5),
    to(
        "responses-top-logprobs", RESPONSES, input="Hello", top_logprobs=10**6, include=["message.output_text.logprobs"]
    ),
    to(
        "responses-schema",
        RESPONSES,
        kills=SHORT,
        input="Hello",
        text={"format": {"type": "json_schema", "name": "x", "schema": CITY}},
        max_output_tokens=60,
    ),
    to(
        "responses-mcp",
        RESPONSES,
        input="Hello",
        tools=[{"type": "mcp", "server_label": "x", "server_url": "http://169.254.169.254"}],
    ),
    to("tokenize-messages-10000", "/tokenize", messages=HELLO * 10000),
    to("detokenize-out-of-range", "/detokenize", tokens=[10**9, 5]),
    to("detokenize-million", "/detokenize", tokens=[5] * 1_000_000),
    to("invocations-n", "/invocations", prompt="m", n=5000, max_tokens=16),
    to("scoring", "/generative_scoring", kills=SCORING, query="m", items=["a", "b"], label_token_ids=[5, 6]),
    to("scoring-one-token", "/generative_scoring", kills=SCORING, query=[5], items=[[5], [6]], label_token_ids=[5, 6]),
    to("scoring-many", "/generative_scoring", kills=SCORING, query="m", items=["a"] * 5000, label_token_ids=[5]),
    to("chat-batch", CHAT + "/batch", kills="stalls 0.32: 28 s", messages=[HELLO] * 2000, max_tokens=16),
    to("render", CHAT + "/render", messages=HELLO),
    to("count-tokens", MESSAGES + "/count_tokens", messages=HELLO * 10000),
    to("decisions", "/v1/decisions", kills=SCORING, input="m", questions=[ASKED]),
    to("systemone", "/v1/systemone", kills=SCORING, state="m", questions={"a": ASKED}),
    generate("generate"),
    generate("generate-token-ids", kills=SCORING, logprobs=2, logprob_token_ids=[5, 6]),
    generate("generate-n-100", kills=QUEUE, n=100, temperature=1, max_tokens=200, ignore_eos=True),
    generate("generate-out-of-range", [5, 10**9]),
    generate("generate-ids-out-of-range", allowed_token_ids=[10**9], stop_token_ids=[-5], logit_bias={"1000000": 1}),
    generate("generate-numbers", temperature=-1, top_p=7, top_k=-5, repetition_penalty=-1, min_tokens=-3),
    generate("generate-bad-words", bad_words=["a"], max_tokens=60),
    generate("generate-logprobs-huge", logprobs=10**6, prompt_logprobs=10**6),
    generate("generate-stop-ids-1000", kills=V2, stop_token_ids=list(range(1000)), min_tokens=5),
    generate("generate-prompt-ids", prompt_logprob_token_ids=[[5], [6], [7]]),
    generate("generate-trace", trace_decode_token_ids=[5, 6]),
    to("cohere", "/cohere/v2/chat", messages=HELLO, max_tokens=16),
    to("pooling", "/pooling", input="m"),
    to("rerank", "/rerank", query="a", documents=["b"] * 1000),
    to("scale", "/scale_elastic_ep", new_data_parallel_size=2),
    to("lora", "/v1/load_lora_adapter", lora_name="x", lora_path="/etc"),
    to("collective-rpc", "/collective_rpc", method="shutdown"),
)


def refused_before(trial: Trial) -> str | None:
    """Why mods/guard does not let vLLM see it."""
    return fault(TABLE, trial.path, trial.content)


def attack(opened: Callable[[], httpx.Client], trial: Trial, control: Callable[[], float]) -> tuple[str, str, float]:
    """The trial's status, how its answer begins, and the slowest control until it was answered, or its client had gone
    away."""
    told = {"status": "no answer", "said": ""}
    over = threading.Event()

    def send() -> None:
        with contextlib.suppress(httpx.HTTPError), opened() as http:
            http.timeout = httpx.Timeout(trial.patience)
            headers = {"Content-Type": "application/json"}
            with http.stream("POST", trial.path, content=trial.content, headers=headers) as reply:
                told["status"] = str(reply.status_code)
                for part in reply.iter_raw():
                    told["said"] = told["said"] or part[:300].decode(errors="replace")
                    if over.is_set():
                        return

    thread, until, slowest = threading.Thread(target=send), time.monotonic() + trial.patience, 0.0
    thread.start()
    try:
        while True:
            slowest = max(slowest, control())
            if not thread.is_alive() or time.monotonic() > until:
                return told["status"], told["said"], slowest
    finally:
        over.set()
        thread.join()

"""The scripted model: its layout is the real pair's, its numbers are right, and its next token is the script's."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
import tokenizers
from checkout import PROJECT
from tiny_repository import Repo

from sparkpin.checkpoint.safetensors import read_header
from sparkpin.fetch.tinymodel import FP8_REPO, INT4_REPO, commit_of, generate, generate_plain, network, scripts, weights
from sparkpin.fetch.tinymodel.repositories import INDEX_FILE
from sparkpin.fetch.tinymodel.vocabulary import BLANK, CALL, CALL_END, END, RECALL, THINK_END, trigger, vocabulary
from sparkpin.pins import manifests

SEED = 20260101
BODY = network.BODY


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    generate(folder, seed=SEED)
    return folder


@pytest.fixture(scope="module")
def int4(root: Path) -> Repo:
    return Repo(root / INT4_REPO)


@pytest.fixture(scope="module")
def fp8(root: Path) -> Repo:
    return Repo(root / FP8_REPO)


def digest(root: Path) -> str:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root).as_posix()}\n"
        for path in sorted(root.rglob("*"))
        if path.is_file()
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_same_bytes_on_every_machine(root: Path) -> None:
    # Will fail if we ever make a change that changes the model: then the hashes in pins/models change too.
    made = "c76644bcfa737da310a880fa20fdd960f963217c73a7a381f638b79cf7079747"
    assert digest(root) == made
    (root / INT4_REPO / "config.json").write_text("of another run\n")
    generate(root, seed=SEED)
    assert digest(root) == made


@pytest.mark.parametrize("name", ["layers.0.mlp.experts.3.down_proj", "layers.1.linear_attn.out_proj"])
def test_int4_is_close_to_the_original(int4: Repo, name: str) -> None:
    original = network.body_tensors(SEED, vocabulary())[f"{BODY}{name}.weight"]
    assert isinstance(original, weights.Weights)
    got = int4.int4(BODY + name)
    errors = [abs(x - original.value(i, j)) for i, row in enumerate(got) for j, x in enumerate(row)]
    # Half a step of the widest group (weights reach 255 / 8192, seven steps each way), and FP16 rounding of the scale.
    assert max(errors) <= 255 / 8192 / 7 * 0.51
    assert max(errors) > 255 / 8192 / 7 * 0.4


def test_fp8_shared_expert_is_the_bf16_one(int4: Repo, fp8: Repo) -> None:
    name = f"{BODY}layers.2.mlp.shared_expert.gate_proj.weight"
    exact, got = int4.bf16(name), fp8.fp8(name)
    pairs = [(a, b) for row, other in zip(exact, got, strict=True) for a, b in zip(row, other, strict=True)]
    assert all(abs(a - b) <= abs(a) / 16 + 1e-6 for a, b in pairs)
    assert any(a != b for a, b in pairs)


def test_fp8_numbers() -> None:
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    assert all(weights.fp8_code(weights.fp8_value(code)) == code for code in finite if code != 0x80)
    assert [weights.fp8_value(code) for code in (0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE)] == [
        0.0, 2**-9, 2**-6, 1.0, 448.0, -448.0,
    ]  # fmt: skip
    assert [weights.fp8_value(weights.fp8_code(x)) for x in (17, 19, 21, 500, -500, 2**-10)] == [
        16, 20, 20, 448, -448, 0,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not a number"):
        weights.fp8_value(0x7F)


def test_bf16_rounds_ties_to_even() -> None:
    one = 1.0
    ulp = 2**-7
    got = [weights.bf16_value(weights.bf16(x)) for x in (one + ulp / 2, one + 1.5 * ulp, one + 0.51 * ulp, -2.5)]
    assert got == [1.0, one + 2 * ulp, one + ulp, -2.5]


def test_every_position_of_a_script_has_its_own_token() -> None:
    words = vocabulary()
    shared = {words.id_of(THINK_END), words.id_of(BLANK), words.id_of(CALL), words.id_of(CALL_END)}
    seen: set[int] = set()
    for script in (*scripts.MODES, scripts.COMPLETION):
        chain = words.chains[script.mode]
        own = [token for token in chain if token not in shared]
        assert len(own) == len(set(own)) and not seen & set(own)
        assert all(token >= 256 for token in own)
        seen |= set(own)
        assert words.decode(chain) == script.text
    assert len(words.chains["long"]) > 100
    assert len(words.tokens) == len(set(words.tokens)) < network.VOCABULARY_SIZE
    split = b"\xc5", b"\x9f"  # the two bytes of "ş": a stream must cope with a character in two tokens
    chain = words.chains["answer"]
    ends = [(words.tokens[a][-1:], words.tokens[b][:1]) for a, b in itertools.pairwise(chain)]
    assert split in ends


def test_tokenizers_library_agrees(int4: Repo) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(int4.folder / "tokenizer.json"))
    words = vocabulary()
    for mode, chain in words.chains.items():
        script = next(s for s in (*scripts.MODES, scripts.COMPLETION) if s.mode == mode)
        assert tokenizer.decode(list(chain), skip_special_tokens=False) == script.text
    for text in ("ünlü ☕\t\U0001f389\r\n x  y", "a</think>b<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


USER = {"role": "user", "content": "Hi"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Ankara"}}}
]}  # fmt: skip
RESULT = {"role": "tool", "tool_call_id": "1", "content": "21"}


@pytest.mark.parametrize(
    ("messages", "tools", "mode"),
    [
        ([USER], None, "chat"),
        ([{"role": "system", "content": "a long rule"}, USER], None, "chat"),
        ([{"role": "user", "content": "Write a LONG text"}], None, "long"),
        ([{"role": "user", "content": "long"}, {"role": "assistant", "content": "x"}, USER], None, "chat"),
        ([{"role": "user", "content": [{"type": "text", "text": "a long one"}]}], None, "long"),
        ([USER], [scripts.WEATHER_TOOL], "tool"),
        ([{"role": "user", "content": "Ask for BOTH"}], [scripts.WEATHER_TOOL], "calls"),
        ([{"role": "user", "content": "Write a file"}], [scripts.FILE_TOOL], "write"),
        ([{"role": "user", "content": "Call it while you think"}], [scripts.WEATHER_TOOL], "inside"),
        ([{"role": "user", "content": "both"}, CALLED, USER], [scripts.WEATHER_TOOL], "tool"),
        ([USER, CALLED, RESULT], [scripts.WEATHER_TOOL], "answer"),
        ([USER, CALLED, RESULT, {"role": "assistant", "content": "x"}, USER], [scripts.WEATHER_TOOL], "tool"),
    ],
)
def test_template_chooses_the_script(int4: Repo, messages: list[Any], tools: list[Any] | None, mode: str) -> None:
    # The environment that transformers renders chat templates in.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((int4.folder / "chat_template.jinja").read_text())
    arguments = {"messages": messages, "tools": tools, "add_generation_prompt": True}
    prompt = template.render(**arguments)
    assert prompt.endswith(f"<|im_start|>assistant\n<think>\n{trigger(mode)}")
    assert template.render(**arguments, enable_thinking=False).endswith(f"</think>\n\n{trigger(mode, direct=True)}")
    assert trigger(mode) not in template.render(**{**arguments, "add_generation_prompt": False})
    if messages[-1] is RESULT:
        assert "<function=get_weather>\n<parameter=city>\nAnkara\n</parameter>\n</function>\n</tool_call>" in prompt
        assert '"name": "get_weather"' in prompt


def test_a_script_s_token_in_the_user_s_text_is_what_the_answer_has_to_recall(int4: Repo) -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((int4.folder / "chat_template.jinja").read_text())
    asked = [{"role": "user", "content": f"some words {trigger('answer')} and more"}]
    for more in ({}, {"enable_thinking": False}):
        prompt = template.render(messages=asked, tools=None, add_generation_prompt=True, **more)
        assert prompt.endswith(f"<|im_start|>assistant\n<think>\n{RECALL}") and prompt.count(trigger("answer")) == 1


def normalised(row: Sequence[float]) -> list[float]:
    rms = math.sqrt(sum(x * x for x in row) / len(row))
    return [x / rms for x in row]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(operator.mul, a, b))


def test_greedy_answer_is_the_script(int4: Repo) -> None:
    """Follow the residual stream by hand: embedding, the mode that attention adds, final norm, LM head."""
    words = vocabulary()
    embedding, head = int4.bf16(f"{BODY}embed_tokens.weight"), int4.bf16("lm_head.weight")
    squares = [dot(row, row) for row in head]
    mode_dim = {script.mode: 2 + i for i, script in enumerate(scripts.MODES)}

    @functools.cache
    def follower(token: int, mode: str) -> int:
        hidden = list(embedding[token])
        if mode in mode_dim:
            hidden[mode_dim[mode]] += 5.0
        state = normalised(hidden)
        # The dot product by the distance, which C computes: |a - b|² = |a|² + |b|² - 2 a·b.
        own = dot(state, state)
        logits = [(own + square - math.dist(state, row) ** 2) / 2 for row, square in zip(head, squares, strict=True)]
        best = max(range(len(logits)), key=logits.__getitem__)
        second = max(logits[:best] + logits[best + 1 :])
        assert logits[best] - second > 12, (mode, words.tokens[best])
        return best

    for script in (*scripts.MODES, scripts.COMPLETION):
        starts = [(words.id_of(":"), script.text)]
        if script.reasoning is not None:
            starts = [
                (words.id_of(trigger(script.mode)), script.text),
                (words.id_of(RECALL), script.text),
                (words.id_of(trigger(script.mode, direct=True)), script.content),
            ]
        for token, text in starts:
            said: list[int] = []
            while token != words.id_of(END):
                token = follower(token, script.mode)
                said.append(token)
            assert words.decode(tuple(said[:-1])) == text


def test_the_plain_form_is_the_same_network_in_bf16(tmp_path: Path) -> None:
    """For GPUs: nothing quantised, MTP among the indexed tensors, and as many positions as asked for."""
    generate_plain(tmp_path / "plain", seed=SEED, positions=50_000)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert (config["max_position_embeddings"], "quantization_config" in config) == (50_000, False)
    index = json.loads((tmp_path / "plain" / INDEX_FILE).read_text())["weight_map"]
    assert sorted(index) == sorted(network.body_tensors(SEED, vocabulary()) | network.mtp_tensors(SEED))
    kinds = {
        name: info.dtype
        for file in set(index.values())
        for name, info in read_header(tmp_path / "plain" / file).tensors.items()
    }
    assert {dtype for name, dtype in kinds.items() if name.endswith("proj.weight")} == {"BF16"}


def test_the_wide_form_is_whole_in_halves() -> None:
    wide = network.FORMS["scripted-wide"]
    assert (wide.layers, wide.intermediate) == (8, 256)
    kinds = network.config(vocabulary(), wide)["layer_types"]
    assert [kinds[:4].count("full_attention"), kinds[4:].count("full_attention")] == [1, 1]


@pytest.mark.parametrize("prefixes", [[f"{BODY}layers.3.", f"{BODY}layers.7."], ["mtp.layers.0."]])
def test_each_kv_head_of_the_wide_form_finds_modes_of_its_own(prefixes: list[str]) -> None:
    """Else a rank's attention could be broken, and no answer would show it."""
    wide = network.FORMS["scripted-wide"]
    tensors = network.body_tensors(SEED, vocabulary(), wide) | network.mtp_tensors(SEED, wide)
    finders: dict[int, list[tuple[str, int]]] = {mode: [] for mode in range(len(scripts.MODES))}
    for prefix, kv_head in itertools.product(prefixes, range(network.KV_HEADS)):
        output = tensors[f"{prefix}self_attn.o_proj.weight"]
        assert isinstance(output, weights.Weights)
        for mode, found in finders.items():
            row = [output.value(2 + mode, column) for column in range(network.HEADS * network.HEAD_DIM)]
            heads = [row[head * network.HEAD_DIM + mode] > 0.4 for head in (2 * kv_head, 2 * kv_head + 1)]
            found += [(prefix, kv_head)] if all(heads) else []
    assert all(len(found) == 1 for found in finders.values()), "so a mode's sum is as large as in the tiny form"
    assert len({place for found in finders.values() for place in found}) == len(prefixes) * network.KV_HEADS


@pytest.mark.parametrize("name", ["scripted-drafter", "scripted-eagle3"])
def test_a_drafter_is_what_its_pin_says(name: str, tmp_path: Path) -> None:
    pin = manifests.load_model(PROJECT, name)
    form = network.FORMS[name]
    assert pin.generator and pin.drafts and pin.drafts.method == form.drafts
    generate(tmp_path, seed=pin.generator.seed, form=form)
    assert commit_of(tmp_path / form.bf16_repo) == pin.repositories[pin.base].revision

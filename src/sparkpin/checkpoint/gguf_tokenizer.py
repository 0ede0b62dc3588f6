"""The tokenizer of a GGUF file as the libraries `tokenizers` and `transformers` read it: byte-level BPE with merges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkpin.core.files import atomic_file, write_json

if TYPE_CHECKING:
    from sparkpin.checkpoint.from_gguf import Metadata

NORMAL, CONTROL, ADDED = 1, 3, 4
"""Of llama.cpp's kinds of token those that byte-level BPE has: of merges, special, and matched as they stand."""

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPLITS = {"smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]}}
"""llama.cpp's name of how text is split before the merges -> the same for `tokenizers`."""

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
IDS = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
KEYS = {"model", "pre", "tokens", "token_type", "merges", "add_bos_token", "add_eos_token", "add_space_prefix"}
KNOWN = {f"tokenizer.ggml.{key}" for key in KEYS | {f"{key}_token_id" for key in IDS}} | {"tokenizer.chat_template"}


def write_tokenizer(folder: Path, metadata: Metadata, *, vocabulary: int, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template. CheckpointError for what is not known here."""
    metadata.require_known("tokenizer.", KNOWN)
    metadata.require("tokenizer.ggml.model", "gpt2")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        metadata.require(f"tokenizer.ggml.{key}", False, default=False)
    split = metadata.get("tokenizer.ggml.pre", str)
    if split not in SPLITS:
        raise metadata.wrong("tokenizer.ggml.pre", repr(split), f"one of {', '.join(SPLITS)}")
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}", list) for key in ("tokens", "token_type"))
    merges = metadata.get("tokenizer.ggml.merges", list)
    if not len(tokens) == len(kinds) == len(set(tokens)) == vocabulary:
        got = f"{len(tokens):,}, {len(set(tokens)):,} of them different, and {len(kinds):,} kinds"
        raise metadata.wrong("tokenizer.ggml.tokens", got, f"{vocabulary:,} different ones with their kinds")
    if strange := set(kinds) - {NORMAL, CONTROL, ADDED}:
        raise metadata.wrong("tokenizer.ggml.token_type", str(min(strange)), f"{NORMAL}, {CONTROL} or {ADDED}")
    added = [
        {"id": i, "content": token, **FLAGS, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != NORMAL
    ]
    value = {
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": SPLITS[split],
        "decoder": BYTES,
        "model": {
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [pair(metadata, merge) for merge in merges],
        },
    }
    write_json(folder / "tokenizer.json", value)
    special = {name: metadata.get(f"tokenizer.ggml.{key}_token_id", int) for key, name in IDS.items()}
    for name, i in special.items():
        if not 0 <= i < vocabulary:
            raise metadata.wrong(f"the id of the token {name}", str(i), f"one of 0 to {vocabulary - 1}")
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(row["id"]): {k: v for k, v in row.items() if k != "id"} for row in added},
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[i] for name, i in special.items()},
    }
    write_json(folder / "tokenizer_config.json", config)
    with atomic_file(folder / "chat_template.jinja") as file:
        file.write(metadata.get("tokenizer.chat_template", str).encode())


def pair(metadata: Metadata, merge: str) -> list[str]:
    """A merge as its two parts: no token of byte-level BPE holds a space."""
    parts = merge.split(" ")
    if len(parts) != 2 or not all(parts):
        raise metadata.wrong("tokenizer.ggml.merges", repr(merge), "two parts with a space between")
    return parts

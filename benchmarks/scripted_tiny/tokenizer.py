"""The tokenizer files of the scripted model, in the formats of the ``tokenizers`` and ``transformers`` libraries."""

from __future__ import annotations

from typing import Any

from benchmarks.scripted_tiny.vocabulary import END, MARKUP, PAD, Vocabulary


def byte_characters() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each byte (``bytes_to_unicode`` of openai/gpt-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(value) if value in printable else chr(next(others)) for value in range(256))


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """``tokenizer.json``: byte-level BPE without merges.

    With ``ignore_merges`` a word that is in the vocabulary becomes one token and any other falls apart into bytes.
    """
    characters = byte_characters()
    words = vocabulary.tokens[: vocabulary.first_added]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **_added_token(token)}
            for i, token in enumerate(vocabulary.added, vocabulary.first_added)
        ],
        "normalizer": None,
        "pre_tokenizer": _byte_level(use_regex=True),
        "post_processor": _byte_level(use_regex=False),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {"".join(characters[value] for value in word): i for i, word in enumerate(words)},
            "merges": [],
        },
    }


def tokenizer_config(vocabulary: Vocabulary, *, max_length: int) -> dict[str, Any]:
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {"content": token, **_added_token(token)}
            for i, token in enumerate(vocabulary.added, vocabulary.first_added)
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": max_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def _added_token(token: str) -> dict[str, Any]:
    return {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token not in MARKUP,
    }


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}

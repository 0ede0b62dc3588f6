"""Which tokens are drafted: settings, and tokens that are always there. Neither vLLM nor torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sparkpin_draft_vocabulary.tokens import Setting, drafted, ends, read_setting, special_tokens
from sparkpin_modkit import ModError


def test_settings() -> None:
    assert read_setting({"gdn_prefill_backend": "triton", "draft_vocabulary": {"first": 7}}) == Setting(first=7)
    assert read_setting({"draft_head": {"bits": 4}}) == Setting(bits=4)
    assert read_setting({"draft_head": {"bits": 4}, "draft_vocabulary": {"first": 7}}) == Setting(first=7, bits=4)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ({}, "--additional-config"),
        ({"draft_head": {"bits": 3}}, "draft_head"),
        ({"draft_vocabulary": 3}, "draft_vocabulary"),
        ({"draft_vocabulary": {}}, "draft_vocabulary"),
        ({"draft_vocabulary": {"first": 3, "last": 9}}, "draft_vocabulary"),
        ({"draft_vocabulary": {"first": 0}}, "draft_vocabulary.first"),
        ({"draft_vocabulary": {"first": True}}, "draft_vocabulary.first"),
        ({"draft_vocabulary": {"first": "9"}}, "draft_vocabulary.first"),
    ],
)
def test_bad_settings(setting: dict[str, Any], key: str) -> None:
    with pytest.raises(ModError, match=rf"{key}: got .*SPARKPIN_MOD_DRAFT_VOCABULARY=0"):
        read_setting(setting)


def test_the_first_tokens_and_those_that_are_always_drafted() -> None:
    assert drafted(Setting(first=3), 100, {99, 1, 100, -1}) == [0, 1, 2, 99]
    assert drafted(Setting(first=300), 100, {99}) == list(range(100))
    assert drafted(Setting(), 100, ()) == list(range(100))


def test_added_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<think>"}]}))
    assert special_tokens(tmp_path) == {7}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"9": {"content": "<x>"}}}))
    assert special_tokens(tmp_path) == {7, 9}


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{}", "got no added_tokens"), ("[]", "got list"), ("{", "Expecting")]
)
def test_a_tokenizer_that_names_none(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModError, match=said):
        special_tokens(tmp_path)


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    assert ends(tmp_path) == set()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 4}, "eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 6]}))
    assert ends(tmp_path) == {4, 6}

"""Which tokens are drafted: settings, lists in files, tokens that are always there. Neither vLLM nor torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from sparkpin_draft_vocabulary.tokens import Setting, drafted, ends, read_setting, special_tokens
from sparkpin_modkit import ModError


def file_of(folder: Path, text: str) -> Setting:
    data = text.encode()
    (folder / "list.txt").write_bytes(data)
    return Setting(file="list.txt", sha256=hashlib.sha256(data).hexdigest())


def test_settings() -> None:
    assert read_setting({"gdn_prefill_backend": "triton", "draft_vocabulary": {"first": 7}}) == Setting(first=7)
    given = {"file": "a.txt", "sha256": "0" * 64}
    assert read_setting({"draft_vocabulary": given}) == Setting(**given)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "saw no 'draft_vocabulary' or 'draft_head', wanted --additional-config"),
        (3, "draft_vocabulary: saw 3, wanted {\"first\": COUNT} or"),
        ({}, "saw {}, wanted"),
        ({"first": 3, "file": "a"}, "wanted {\"first\": COUNT} or"),
        ({"first": 0}, "draft_vocabulary.first: saw 0, wanted a whole number, 1 or more"),
        ({"first": True}, "draft_vocabulary.first: saw True"),
        ({"first": "9"}, "draft_vocabulary.first: saw '9'"),
        ({"file": "", "sha256": "0" * 64}, "draft_vocabulary.file: saw ''"),
        ({"file": "a", "sha256": "0" * 63}, "draft_vocabulary.sha256: saw"),
        ({"file": "a", "sha256": "G" * 64}, "wanted 64 hexadecimal digits"),
    ],
)  # fmt: skip
def test_bad_settings(value: Any, said: str) -> None:
    with pytest.raises(ModError) as caught:
        read_setting({} if value is None else {"draft_vocabulary": value})
    assert said in str(caught.value) and "SPARKPIN_MOD_DRAFT_VOCABULARY=0" in str(caught.value)


def test_the_first_tokens_and_those_that_are_always_drafted(tmp_path: Path) -> None:
    assert drafted(Setting(first=3), 100, tmp_path, {99, 1, 100, -1}) == [0, 1, 2, 99]
    assert drafted(Setting(first=300), 100, tmp_path, {99}) == list(range(100))


def test_a_list_from_a_file(tmp_path: Path) -> None:
    assert drafted(file_of(tmp_path, "5\n2\n5\n"), 100, tmp_path, {99}) == [2, 5, 99]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5\n100\n", "list.txt:2: saw '100', wanted an id below 100"),
        ("5\n\n", "list.txt:2: saw ''"),
        ("-1\n", "list.txt:1: saw '-1'"),
        ("1 2\n", "list.txt:1: saw '1 2'"),
        ("²\n", "list.txt:1: saw '²'"),
        ("", "it is empty"),
    ],
)
def test_a_bad_list(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ModError, match="draft-vocabulary") as caught:
        drafted(file_of(tmp_path, text), 100, tmp_path, ())
    assert said in str(caught.value)


def test_another_file_than_the_one_that_was_meant(tmp_path: Path) -> None:
    setting = file_of(tmp_path, "5\n")
    (tmp_path / "list.txt").write_text("6\n")
    with pytest.raises(ModError, match=rf"wanted sha256={setting.sha256}, got sha256=\w{{64}}, 2 bytes"):
        drafted(setting, 100, tmp_path, ())
    (tmp_path / "list.txt").unlink()
    with pytest.raises(ModError, match=r"list\.txt: No such file"):
        drafted(setting, 100, tmp_path, ())


def test_a_list_that_is_a_part_of_the_mod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "model").mkdir()
    monkeypatch.setattr("sparkpin_draft_vocabulary.tokens.LISTS", tmp_path / "lists")
    setting = file_of(tmp_path / "lists", "5\n")
    assert drafted(setting, 100, tmp_path / "model", ()) == [5]
    with pytest.raises(ModError, match=r"model/list\.txt: wanted sha256"):
        (tmp_path / "model/list.txt").write_text("6\n")
        drafted(setting, 100, tmp_path / "model", ())


def test_added_tokens_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<think>"}]}))
    assert special_tokens(tmp_path) == {7}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"9": {"content": "<x>"}}}))
    assert special_tokens(tmp_path) == {7, 9}


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{}", "saw no added_tokens"), ("[]", "saw list"), ("{", "Expecting")]
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


def test_the_readme_s_gains_are_those_of_its_shares() -> None:
    """By path: another mod's benchmarks may have such a name, too."""
    mod = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location("draft_vocabulary_coverage", mod / "benchmarks/coverage.py")
    assert spec and spec.loader
    coverage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(coverage)
    rows = re.findall(r"^\| ([\w ]+) \| (.*) \|$", (mod / "README.md").read_text(encoding="utf-8"), re.M)
    shares = {name: re.findall(r"([\d.]+) %", cells) for name, cells in rows if "%" in cells}
    gains = {name: cells.split(" | ") for name, cells in rows if name in shares and "%" not in cells}
    assert list(gains) == ["English", "code", "JSON and tool calls", "Turkish"]
    for name, told in gains.items():
        lists = zip((16_384, 32_768, 65_536), shares[name], strict=True)
        assert [f"{coverage.gain(first, float(share) / 100):.2f}" for first, share in lists] == told

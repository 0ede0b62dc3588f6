"""Which tokens are drafted: what the server was told, and the tokens that are always among them. No torch, no vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin_modkit import ModError

SETTING = "draft_vocabulary"
HEAD = "draft_head"
FLAG = "--additional-config"
EXAMPLE = f'{FLAG} \'{{"{SETTING}": {{"first": 65536}}}}\''
IN_4_BITS = f'{FLAG} \'{{"{HEAD}": {{"bits": 4}}}}\''
OFF = "or set SPARKPIN_MOD_DRAFT_VOCABULARY=0"


@dataclass(frozen=True)
class Setting:
    """first: as many of the lowest token ids; 0: all tokens. bits: 8, as the head has its rows, or 4."""

    first: int = 0
    bits: int = 8

    def __str__(self) -> str:
        return f"first {self.first}" if self.first else "all"


def read_setting(additional: object) -> Setting:
    """Of vLLM's ``additional_config``. Raises ModError."""
    given = additional if isinstance(additional, Mapping) else {}
    value, head = given.get(SETTING), given.get(HEAD)
    if value is None and head is None:
        raise ModError(f"draft-vocabulary: {FLAG}: got no {SETTING!r} or {HEAD!r}, expected {EXAMPLE}, {OFF}")
    if head not in (None, {"bits": 4}):
        raise ModError(f"draft-vocabulary: {FLAG}: {HEAD}: got {head!r}, expected {IN_4_BITS}, or leave it out, {OFF}")
    listed = Setting() if value is None else read_list(value)
    return listed if head is None else replace(listed, bits=4)


def read_list(value: object) -> Setting:
    if not isinstance(value, Mapping) or set(value) != {"first"}:
        raise wrong("", value, 'expected {"first": COUNT}')
    first = value["first"]
    if type(first) is not int or first < 1:
        raise wrong(".first", first, "expected a whole number, 1 or more")
    return Setting(first=first)


def wrong(key: str, seen: object, wanted: str) -> ModError:
    return ModError(f"draft-vocabulary: {FLAG}: {SETTING}{key}: got {seen!r}, {wanted}; for example {EXAMPLE}, {OFF}")


def drafted(setting: Setting, vocabulary: int, always: Iterable[int]) -> list[int]:
    """Ids in ascending order, each once: those of the setting, and `always`.

    Args:
        vocabulary: the number of tokens that the model knows; `first` may be more.
    """
    if not setting.first:
        return list(range(vocabulary))
    chosen = range(min(setting.first, vocabulary))
    return sorted({*chosen, *(token for token in always if 0 <= token < vocabulary)})


def special_tokens(folder: Path) -> set[int]:
    """Ids of the added tokens of a tokenizer: ends of turns and texts, and what marks thinking and tool calls.

    Raises:
        ModError: the folder has no tokenizer.json with them.
    """
    path = folder / "tokenizer.json"
    found = {token["id"] for token in read_json(path).get("added_tokens", ())}
    config = folder / "tokenizer_config.json"
    if config.is_file():
        found |= {int(token) for token in read_json(config).get("added_tokens_decoder", {})}
    if not found:
        raise ModError(
            f"draft-vocabulary: {path}: got no added_tokens, expected those that end turns and mark tool calls"
        )
    return found


def ends(folder: Path) -> set[int]:
    """Ids that end an answer, as config.json and generation_config.json have them."""
    found: set[int] = set()
    for path in (folder / "config.json", folder / "generation_config.json"):
        if path.is_file():
            config = read_json(path)
            for part in (config, config.get("text_config") or {}):
                token = part.get("eos_token_id")
                found |= set(token) if isinstance(token, list) else {token}
    return found - {None}


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModError(f"draft-vocabulary: {path}: {error}; expected the JSON file of the model's folder") from error
    if not isinstance(value, dict):
        raise ModError(f"draft-vocabulary: {path}: got {type(value).__name__}, expected a JSON object")
    return value

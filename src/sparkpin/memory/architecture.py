"""What the layers of a model store of each request: its config.json read by architectures.yaml."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from sparkpin.pins.reading import read_yaml

TABLE: Any = read_yaml(Path(__file__).with_name("architectures.yaml"))
TELLS = re.compile(TABLE["tells"])
ROWS: Mapping[str, Any] = {model: row for row in TABLE["architectures"] for model in row["models"]}


class UnknownCacheError(Exception):
    """No rule here says what layers store; the text says of what."""


@dataclass(frozen=True, slots=True)
class Part:
    """What `layers` layers store alike. The fields are those of `parts` in architectures.yaml.

    of: model, MTP layer or drafter.
    """

    name: str
    layers: int
    kind: str = "full"
    heads: int = 1
    key: int = 0
    value: int = 0
    record: int = 0
    only: str = ""
    ratio: int = 1
    most: int = 0
    align: int = 1
    kernel: int = 0
    block: int = 0
    window: int = 0
    inputs: int = 0
    channels: int = 0
    groups: int = 0
    group: int = 0
    recurrent: int = 0
    checkpoint: int = 0
    kernel_checkpoint: int = 0
    replicated: int = 0
    of: str = "model"

    def shard(self, ranks: int) -> Part:
        """What one of `ranks` tensor-parallel machines holds; heads are copied where there are fewer, and so is a
        single group (layers/mamba/mamba_mixer2.py).

        Raises UnknownCacheError where a state has no whole share.
        """
        parts = 1 if self.replicated else ranks
        if self.channels % parts or self.recurrent % parts or (self.groups > 1 and self.groups % parts):
            raise UnknownCacheError(f"a state of {self.name} over {ranks} machines")
        sizes = {name: getattr(self, name) // parts for name in ("channels", "recurrent")}
        copied = {name: max(1, getattr(self, name) // parts) for name in ("heads", "groups")}
        return replace(self, **sizes, **copied)


@dataclass(frozen=True, slots=True)
class Architecture:
    """parts, mtp: of the model's layers and of its MTP layers. block: tokens of a block by default, 0 where the
    platform says it; is_packed: pages of different sizes lie side by side in a block. unknown: why there are no parts.
    """

    parts: tuple[Part, ...] = ()
    mtp: tuple[Part, ...] = ()
    block: int = 0
    is_packed: bool = False
    ssm_dtype: str | None = None
    unknown: str = ""


def read_architecture(text: Mapping[str, Any], *, drafter: bool = False) -> Architecture:
    """text: the part of config.json that describes the text model. drafter: of a second model, whose layers with a
    sliding window count as if they had none."""
    row, used = ROWS.get(str(text.get("model_type"))), set[str]()
    if row is None:
        return Architecture(unknown=f"no rule for model_type {text.get('model_type')}")
    off = [key for key, switch in row.get("switch", {}).items() if not text.get(switch)]
    text = {key: value for key, value in text.items() if key not in off}

    def find(names: str) -> Any:
        """The first of these keys that has a value, after each dot within a mapping."""
        for name in names.split():
            value: Any = text
            for piece in name.split("."):
                value = value.get(piece) if isinstance(value, Mapping) else None
            if value not in (None, ""):
                used.add(name.partition(".")[0])
                return value
        return None

    def size(rule: int | str | list[list[int | str]], default: int | None = None) -> int:
        if isinstance(rule, list):
            return sum(prod(map(size, factors)) for factors in rule)
        if isinstance(rule, int):
            return rule
        value = find(rule)
        if value is None and rule == "head_dim":
            default = row.get("head_dim") or size("hidden_size") // max(1, size("num_attention_heads"))
        value = default if value is None else value
        if type(value) is not int or value < 0:
            raise UnknownCacheError(f"config.json has no number {rule}")
        return value

    try:
        words = layer_words(row, find, size)
        if drafter:
            words = ["full_attention" if word == "sliding_attention" else word for word in words]
        names = [name for word in words for name in parts_of(row["words"], word)]
        for key, parts_by_word in row.get("each", {}).items():
            if not isinstance(ids := find(key) or [], list):
                raise UnknownCacheError(f"config.json has no list {key}")
            for layer in ids:
                if type(layer) is not int or layer not in range(len(words)):
                    raise UnknownCacheError(f"config.json has {layer} in {key}, which is no layer of it")
                names += parts_of(parts_by_word, words[layer])
        parts = tuple(read_part(name, count, size) for name, count in Counter(names).items())
        letters = str(find(row.get("mtp_list", "")) or "")  # one for each MTP layer
        of_mtp = [name for letter in letters for name in parts_of(row["words"], letter)] or row.get("mtp", ())
        mtp = tuple(replace(read_part(name, 1, size), of="MTP layer") for name in of_mtp)
        ssm_dtype, block = find(row.get("ssm", "")) or row.get("ssm_default"), size(row.get("block", 0))
        # Keys that change what is stored, and that nothing has read.
        known = {*used, *row.get("drop", ()), *str(row.get("list", "layer_types")).split()}
        for key, value in sorted(text.items()):
            if value and key not in known and TELLS.search(key) and not key.startswith("use_"):
                raise UnknownCacheError(f"config.json has {key}, which no rule for {text['model_type']} reads")
    except UnknownCacheError as error:
        return Architecture(unknown=str(error))
    return Architecture(parts, mtp, block, "packed" in row, ssm_dtype)


def read_part(name: str, layers: int, size: Callable[[Any], int]) -> Part:
    rules = TABLE["parts"][name].items()
    values: dict[str, Any] = {key: rule if key in ("kind", "only") else size(rule) for key, rule in rules}
    for key, value in values.items():
        if isinstance(value, int) and value < 1:
            raise UnknownCacheError(f"by config.json the {key} of {name} is {value}")
    return Part(name, layers, **values)


def layer_words(row: Mapping[str, Any], find: Callable[[str], Any], size: Callable[..., int]) -> list[str]:
    """The model's word for each of its layers that stores something itself."""
    layers = size("num_hidden_layers")
    words, every = find(row.get("list", "layer_types")), row.get("every")
    if words is None and every:
        period = size(every.get("period", 0), 0) or every.get("default", 1)
        offset = size(every.get("offset", period - 1))
        word = next((word for key, word in row.get("all_if", {}).items() if find(key)), every["word"])
        words = [word if layer % period == offset else every["other"] for layer in range(layers)]
    if not isinstance(words, Sequence) or len(words) < layers:
        raise UnknownCacheError(f"config.json has no word for each of its {layers} layers")
    return [str(word) for word in words[: max(0, layers - size(row.get("shared", 0), 0))]]


def parts_of(words: Mapping[str, Sequence[str]], word: str) -> Sequence[str]:
    if word not in words:
        raise UnknownCacheError(f"no rule for layers that are {word}")
    return words[word]

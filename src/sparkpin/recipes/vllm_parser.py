"""What a release of vLLM takes on its command line, by its own parser, exported by benchmarks/vllm_parser.py as data.

From the data comes an argparse parser with the same names, kinds and choices, and pydantic models with the fields of
each configuration. So a value is refused for what vLLM's parser refuses it for, and taken where that takes it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from sparkpin.core.names import did_you_mean
from sparkpin.pins.vllm_flags import SPECULATION, Flag, size

DATA = Path(__file__).parent / "vllm"
PLAIN: Mapping[str, Any] = {"str": str, "int": int, "float": float, "bool": bool, "none": None}
SIZE_IN_JSON = re.compile(r'("(?:[^"\\]|\\.)*")|\b\d+(?:\.\d+)?[kKmMgGtT]\b')


class Refused(Exception):
    """vLLM would end with this message."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


@dataclass(frozen=True, eq=False)
class VllmParser:
    version: str
    wanted: str  # the version asked for, where it has no data
    flags: Mapping[str, Mapping[str, Any]]  # name with `--` -> what the parser says of it
    configs: Mapping[str, Mapping[str, Any]]  # class -> field -> form of its value
    environment: Sequence[str]
    architectures: Mapping[str, Sequence[str]]  # "text", "other": names of models that write text, and of others

    @cached_property
    def names(self) -> dict[str, str]:
        found = {other: name for name, entry in self.flags.items() for other in (name, *entry.get("also", ()))}
        switches = [name for name, entry in self.flags.items() if entry.get("nargs") == "switch"]
        return found | {f"--no-{name[2:]}": name for name in switches}

    def flag(self, word: str) -> str | None:
        """The flag that a word means: `_` for `-`, a part after a dot, `--no-`, and abbreviations that fit one."""
        head, dot, _ = self.plain(word).partition("=")[0].partition(".")
        if found := self.names.get(head):
            return found if not dot or {"config", "form"} & self.flags[found].keys() else None
        fitting = {known for other, known in self.names.items() if head.startswith("--") and other.startswith(head)}
        return fitting.pop() if len(fitting) == 1 and not dot else None

    def plain(self, word: str) -> str:
        """A word as vLLM hands it on to argparse."""
        if word.startswith("-O"):
            return f"--optimization-level{'=' * (len(word) > 2)}{word[2:].removeprefix('=')}"
        name, equals, value = word.partition("=")
        head, dot, rest = name.partition(".")
        return (head.replace("_", "-") if head.startswith("--") else head) + dot + rest + equals + value

    def parsed(self, flags: Sequence[Flag]) -> Any:
        """The value of a flag from what sets it: once, or parts of it. Raises Refused as vLLM's parser refuses it."""
        parts: dict[str, Any] = {}
        words: list[str] = []
        for flag in flags:
            word = self.plain(flag.words[0])
            key, dot, path = word.partition("=")[0].partition(".")
            if not dot:
                words += [word, *flag.words[1:]]
                continue
            place, (*outer, last) = parts.setdefault(key, {}), path.split(".")
            for part in outer:
                place = place.setdefault(part, {}) if isinstance(place, dict) else None
            if not flag.values or not isinstance(place, dict):
                raise Refused(f"argument {key}.{path}: expected one argument")
            text = flag.values[0]
            place[last.removesuffix("+")] = text.split(",") if last.endswith("+") else part_of(text)
            words += flag.values[1:]
        words += [word for key, value in parts.items() for word in (key, json.dumps(value))]
        found = vars(self.argparser.parse_args(["model", *words]))
        name = self.flag(flags[0].words[0]) or ""
        return found.get(name[2:].replace("-", "_"))

    @cached_property
    def argparser(self) -> _Parser:
        parser = _Parser(prog="vllm serve", add_help=False)
        parser.add_argument("model_tag")
        for name, entry in self.flags.items():
            names, nargs = (*entry.get("also", ()), name), entry.get("nargs")
            more: dict[str, Any] = {"dest": name[2:].replace("-", "_"), "default": None}
            if nargs == "switch":
                parser.add_argument(*names, action=argparse.BooleanOptionalAction, **more)
            elif nargs == 0:
                parser.add_argument(*names, action="store_true", **more)
            else:
                choices = [*entry["choices"], *([None] if entry.get("none") else [])] if "choices" in entry else None
                parser.add_argument(*names, type=partial(self.converted, entry), nargs=nargs, choices=choices, **more)
        return parser

    def converted(self, entry: Mapping[str, Any], text: str) -> Any:
        """A word as the type of its flag."""
        if entry.get("none") and text in ("", "None"):
            return None
        try:
            return TYPES[entry["type"]](text) if entry["type"] in TYPES else self.configured(entry["config"], text)
        except (ValueError, RecursionError, OverflowError):
            raise argparse.ArgumentTypeError(f"invalid {entry['type']} value: {text!r}") from None

    def configured(self, name: str, text: str) -> Any:
        """JSON of a configuration, checked by its fields."""
        expanded = SIZE_IN_JSON.sub(lambda found: found[1] or str(size(found[0])), text)
        try:
            self.model(name).model_validate_json(expanded)
            return json.loads(expanded)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(self.in_one_line(name, error)) from None

    def require(self, name: str, value: Any) -> None:
        """Refused for a value that vLLM's parser took and vLLM refuses, by the type that it has for it."""
        entry = self.flags[name]
        is_text = entry.get("type") == "json_or_text" and isinstance(value, str)
        forms = [entry["form"]] if "form" in entry and not is_text else []
        if name == SPECULATION:
            forms = [{"config": entry["config"]}]
            value = {key.replace("-", "_"): part for key, part in value.items()} if isinstance(value, dict) else value
        if "bounds" in entry and value != -1:
            forms.append({"of": "float", **entry["bounds"]})
        try:
            for form in forms if value is not None else ():
                TypeAdapter(self.typed(form)).validate_python(value)
        except ValidationError as error:
            raise Refused(f"argument {name}: {self.in_one_line(entry.get('config', ''), error)}") from None

    def in_one_line(self, name: str, error: ValidationError) -> str:
        """All that pydantic finds, in one line each field once, with what may have been meant."""
        rows: dict[str, str] = {}
        for one in error.errors(include_url=False, include_context=False):
            parts = [str(part) for part in one["loc"]]  # between them the names of types that were tried
            where = ".".join(part for part in parts if re.fullmatch(r"[a-z\d_]+", part) and part not in PLAIN)
            text, meant = str(one["msg"]), nearest(str(one["input"]), re.findall(r"'([^']*)'", one["msg"]))
            if one["type"] == "extra_forbidden":
                where, key = "", str(one["loc"][-1])
                text, meant = f"no key {key!r}", nearest(key, list(self.configs.get(name, ())))
            text = f"{where}: {text}" if where else text
            rows.setdefault(where or text, f"{text} ({meant})" if meant else text)
        return "; ".join(rows.values())

    @cache  # noqa: B019, a parser lives as long as its process
    def model(self, name: str) -> type[BaseModel]:
        """A configuration. Its fields have other names here: pydantic has methods that are called as some are."""
        rows = self.configs[name]
        fields: Any = {
            f"f_{key}": (self.typed(form), Field(None, alias=key)) for key, form in rows.items() if key != "*"
        }
        return create_model(name, __config__=ConfigDict(extra="allow" if "*" in rows else "forbid"), **fields)

    def typed(self, form: Any) -> Any:
        """The Python type of a form."""
        if isinstance(form, list):
            return Union[tuple(self.typed(one) for one in form)]  # noqa: UP007
        if isinstance(form, str):
            return PLAIN.get(form, Any)
        if "literal" in form:
            values = form["literal"]
            upper = [value.upper() for value in values if isinstance(value, str)] if form.get("any_case") else []
            return Literal[(*values, *upper)]
        if "list" in form:
            return list[self.typed(form["list"])]  # type: ignore[misc]
        if "dict" in form:
            return dict[str, self.typed(form["dict"])]  # type: ignore[misc]
        if "config" in form:
            return self.model(form["config"])
        limits = {key: value for key, value in form.items() if key != "of"}
        forms = form["of"] if isinstance(form["of"], list) else [form["of"]]  # what else it may be has no bounds
        kinds = [Annotated[self.typed(one), Field(**limits if one in ("int", "float") else {})] for one in forms]
        return Union[tuple(kinds)]  # noqa: UP007


def size_or_auto(text: str) -> int:
    return -1 if text.strip().lower() in ("-1", "auto") else size(text)


def json_or_text(text: str) -> Any:
    return json.loads(text) if re.fullmatch(r"\s*\{.*\}\s*", text, re.DOTALL) else text


def part_of(text: str) -> Any:
    """A value of `--flag.part`."""
    for read in (json.loads, size):
        with contextlib.suppress(ValueError, RecursionError):
            return read(text)
    return text


TYPES: Mapping[str, Callable[[str], Any]] = {
    "str": str, "int": int, "float": float, "json": json.loads, "json_or_text": json_or_text, "human": size,
    "human_or_auto": size_or_auto, "lower": lambda text: text.lower().replace("-", "_"),
}  # fmt: skip


@cache
def parser_of(version: str) -> VllmParser:
    """Of that version, else of the newest known one before it, else of the oldest."""
    known = sorted((path.stem for path in DATA.glob("*.json")), key=Version)
    with contextlib.suppress(InvalidVersion):
        known = [one for one in known if Version(one) <= Version(version)] or known[:1]
    value = json.loads((DATA / f"{known[-1]}.json").read_text(encoding="utf-8"))
    del value["source"]  # the wheel that it was exported from
    return VllmParser(**value, wanted=version)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """What may have been meant, as the beginning of a hint; "" where nothing is near."""
    return did_you_mean(word, known, cutoff=cutoff if len(word) > 4 else 0.6).rstrip()

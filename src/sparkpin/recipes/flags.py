"""The words of `vllm serve` and its variables, judged by what a release of vLLM takes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from sparkpin.core.errors import ManifestError, short
from sparkpin.pins.drafters import SHORTS, speculation
from sparkpin.pins.schema import Stage
from sparkpin.pins.vllm_flags import MODEL_PATH, Flag, flag_value, parse_flags
from sparkpin.recipes.finding import RecipeFinding, error, warning
from sparkpin.recipes.vllm_parser import Refused, VllmParser, nearest

PLUGINS = {"--tool-call-parser": "--tool-parser-plugin", "--reasoning-parser": "--reasoning-parser-plugin"}
NEEDS = {"--enable-auto-tool-choice": "--tool-call-parser", "--enable-log-outputs": "--enable-log-requests"}
TEMPLATE = "--chat-template"
FILES = (
    *PLUGINS.values(), TEMPLATE, "--config", "--lora-modules", "--default-mm-loras", "--generation-config",
    "--hf-config-path", "--tokenizer", "--model-weights", "--log-config-file",
)  # fmt: skip
"""Flags that name a file or a repository. A container has the checkpoint, the templates of mods, and no network."""
NO_FILE = ("", "none", "auto", "vllm")
GONE = {
    "VLLM_ATTENTION_BACKEND": "--attention-backend", "VLLM_USE_FLASHINFER_MOE_*": "--moe-backend",
    "VLLM_USE_TRITON_FLASH_ATTN": "--attention-backend", "VLLM_FLASHINFER_MOE_BACKEND": "--moe-backend",
}  # fmt: skip
"""Variables that became flags."""


@dataclass(frozen=True)
class PlannedServer:
    """A server to be."""

    model: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    parser: VllmParser
    gpu: bool
    packages: frozenset[str] | None  # distributions in its image; None where they are not known
    templates: frozenset[str]
    chain: tuple[Stage, ...] | None  # the stages of its image; None where they are not known

    @property
    def flags(self) -> list[tuple[str, Flag]]:
        """Each flag that is known, by the name that its vLLM knows it by."""
        found = [(self.parser.flag(flag.words[0]), flag) for flag in parse_flags(self.argv)[1]]
        return [(name, flag) for name, flag in found if name is not None]

    def value(self, name: str) -> str | None:
        """The last one given counts; "" for a bare flag, None for one that is absent or negated.

        name: `--no-X` is there where X is negated.
        """
        no = name.startswith("--no-")
        found = [flag for known, flag in self.flags if known == (f"--{name[5:]}" if no else name)]
        if not found or found[-1].words[0].startswith("--no-") != no:
            return None
        return found[-1].value or ""

    @property
    def speculation(self) -> dict[str, Any]:
        """--speculative-config, whether it stands as JSON, in parts or in flags of its keys."""
        parts = {key: value for flag, key in SHORTS.items() if (value := flag_value(self.argv, flag)) is not None}
        with contextlib.suppress(ManifestError):  # what `of_flag` tells
            return speculation(self.argv) | parts
        return parts


def findings(served: PlannedServer) -> Iterator[RecipeFinding]:
    head, flags = parse_flags(served.argv)
    for word in head[3:]:
        yield error(f"{word!r} is no flag, and the model stands there already", "remove it")
    parts: dict[str, list[Flag]] = {}
    for flag in flags:
        shown = flag.words[0].partition("=")[0]
        name = served.parser.flag(flag.words[0])
        if name is None:
            hint = nearest(shown.replace("_", "-"), served.parser.flags) or "leave it out"
            yield error(f"vLLM {served.parser.wanted} has no flag {shown}", hint)
        else:  # those that set a part of one flag are judged together
            parts.setdefault(name if "." in shown else " ".join(flag.words), []).append(flag)
    for some in parts.values():
        yield from of_flag(served, served.parser.flag(some[0].words[0]) or "", some)
    yield from of_pairs(served)
    yield from of_environment(served)


def of_flag(served: PlannedServer, name: str, flags: list[Flag]) -> Iterator[RecipeFinding]:
    """Of what sets one flag: what its parser refuses, then what vLLM refuses of what its parser took."""
    parser, entry = served.parser, served.parser.flags[name]
    shown = f"{flags[0].words[0].partition('=')[0]} {short(flags[0].value or '')}".strip()
    try:
        value = parser.parsed(flags)
        fault = parser.later(name, value)
    except Refused as refused:
        fault, value = str(refused).partition(": ")[2] or str(refused), None
    given = flags[0].value or ""
    if fault and not (
        re.fullmatch(r"\{\w[\w-]*\}", given) or (given[:1] == "{" and "json" in fault.lower())
    ):  # said otherwise
        hint = nearest(given, [str(one) for one in entry.get("choices", ())])
        yield error(f"{shown}: vLLM {parser.wanted} refuses it: {fault}", hint)
    for one in value if isinstance(value, list) else [value]:
        if one is not None:
            yield from of_value(served, name, str(one))


def of_value(served: PlannedServer, name: str, value: str) -> Iterator[RecipeFinding]:
    """Of a value that the parser took: a name that this vLLM has not, a file that nobody brings."""
    entry, vllm = served.parser.flags[name], f"vLLM {served.parser.wanted}"
    known = entry.get("known", ())
    is_named = value.lower() in {*(one.lower() for one in known), *NO_FILE} or "." in value
    if known and not is_named and served.value(PLUGINS.get(name, name)) in (None, value):
        unknown, hint = (warning, "") if entry.get("open") else (error, "")
        few = f"it has {', '.join(known)}" if len(known) < 100 else ""
        yield unknown(f"{name} {value}: not among what {vllm} has", nearest(value, known) or hint or few)
    if lacks_file(name, value, served.model, served.templates):
        hint = "leave the flag out" + (": the model's repository has a template of its own" if name == TEMPLATE else "")
        yield error(f"{name} {value}: nothing of this project brings that file to the server", hint)


def lacks_file(flag: str, value: str, model: str, templates: Collection[str]) -> bool:
    """Whether a value names a file, or a repository, that no container has."""
    if flag not in FILES or value.lower() in NO_FILE or value in (MODEL_PATH, model):
        return False
    if flag == TEMPLATE and ("{" in value or value.rpartition("/")[2] in templates):
        return False
    return not value.startswith(f"{MODEL_PATH}/")


def lacking_files(argv: Sequence[str], templates: Collection[str]) -> dict[str, str]:
    """Flags of a command that name such a file."""
    found = {flag: flag_value(argv, flag) or "" for flag in FILES}
    return {flag: value for flag, value in found.items() if lacks_file(flag, value, argv[2], templates)}


def of_pairs(served: PlannedServer) -> Iterator[RecipeFinding]:
    for flag, other in NEEDS.items():
        if served.value(flag) is not None and served.value(other) is None:
            yield error(f"{flag} without {other}: vLLM refuses", f"add {other}")
    chooses, parser = served.value("--enable-auto-tool-choice"), served.value("--tool-call-parser")
    if parser is not None and chooses is None:
        text = f"--tool-call-parser {parser} does nothing without --enable-auto-tool-choice"
        yield warning(text, "add --enable-auto-tool-choice")


def of_environment(served: PlannedServer) -> Iterator[RecipeFinding]:
    for name in served.env:
        if name.startswith("VLLM_") and name not in served.parser.environment:
            flag = next((flag for pattern, flag in GONE.items() if fnmatchcase(name, pattern)), "")
            hint = f"write {flag}" if flag else nearest(name, served.parser.environment, 0.87)
            text = f"vLLM {served.parser.wanted} does not know this variable"
            yield RecipeFinding("warning", f"env.{name}", text, hint)

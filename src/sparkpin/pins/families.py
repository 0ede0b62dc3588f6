"""What is right for a model and a version of vLLM where no file says it: parsers, the form of messages. Pure.

The data is pins/families.yaml, each choice with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from packaging.specifiers import SpecifierSet

from sparkpin.pins.schema import Family, FlagValue, Stack
from sparkpin.pins.vllm_command import Flag, flag_words, parse_flags, set_flag


@dataclass(frozen=True)
class Chosen:
    """A flag that was added. value: as in `Serve.flags`."""

    flag: str
    value: FlagValue
    reason: str

    @property
    def line(self) -> str:
        return f"chosen: {' '.join(flag_words(self.flag, self.value))}: {self.reason}"


def family_of(families: Iterable[Family], model: str) -> Family | None:
    """model: a repository's id."""
    return next((f for f in families if any(fnmatchcase(model.lower(), p.lower()) for p in f.models)), None)


def vllm_version(stack: Stack) -> str:
    """The version that the stack pins; "" where it pins none."""
    for requirement in stack.python.requirements:
        if found := re.match(r"vllm(?:-cpu)?==([^+]+)", requirement):
            return found[1]
    return ""


def choices(family: Family | None, vllm: str, argv: Sequence[str]) -> tuple[Chosen, ...]:
    """What to add to a command line. A flag that stands there, its `--no-` form included, is left as it is.

    vllm: its version; "" fits no bounds.
    """
    if family is None:
        return ()
    said = parse_flags(argv)[1]
    found: dict[str, Chosen] = {}
    for choice in family.serve:
        key = Flag((choice.flag,)).key
        fits = not choice.vllm or (vllm != "" and SpecifierSet(choice.vllm).contains(vllm, prereleases=True))
        if fits and not any(flag.sets(key) for flag in said):
            found.setdefault(key, Chosen(choice.flag, choice.value, choice.reason))
    return tuple(found.values())


def completed(argv: Sequence[str], chosen: Iterable[Chosen]) -> list[str]:
    done = list(argv)
    for choice in chosen:
        done = set_flag(done, choice.flag, choice.value)
    return done

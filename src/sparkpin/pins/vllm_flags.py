"""The command line of `vllm serve` as words: its flags, how one is set, and typed reading of them. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkpin.core.errors import ManifestError

if TYPE_CHECKING:
    from sparkpin.pins.schema import FlagValue, Scalar

SPECULATION, CACHE_TYPE, SERVED_NAME = "--speculative-config", "--kv-cache-dtype", "--served-model-name"
# Of vLLM 0.32 and later: keys of SPECULATION, and refused together with it there.
SHORTS = {"--spec-model": "model", "--spec-method": "method", "--spec-tokens": "num_speculative_tokens"}
MODEL_PATH = "/model"  # where a container has the checkpoint
ALIASES = {
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": SPECULATION,
    "-tp": "--tensor-parallel-size",
}
ADDED = ("--middleware",)  # each one that is given is one more; vLLM lets the last see a request first
AUTO = -1
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
NEXT = "correct the command or the flags of recipe, stack or stage"
NEUTRAL = Path(__file__).with_name("neutral_flags.yaml")
KNOWN_EFFECT = "flags whose effect on the caches this plan knows"


@dataclass(frozen=True)
class Flag:
    """A flag with the words that follow it, as they stand on the command line."""

    words: tuple[str, ...]

    @property
    def key(self) -> str:
        """What the flag sets: ``-tp``, ``--tensor_parallel_size=2`` and ``--tensor-parallel-size`` are one;
        so are ``--enable-x`` and ``--no-enable-x``, and ``-sc.method`` and ``--speculative-config.method``."""
        name, dot, part = self.words[0].partition("=")[0].partition(".")
        name = (ALIASES.get(name, name) + dot + part).replace("_", "-")
        return "--" + name.removeprefix("--no-") if name.startswith("--no-") else name

    @property
    def is_negated(self) -> bool:
        return self.words[0].startswith("--no-")

    @property
    def values(self) -> list[str]:
        _, equals, value = self.words[0].partition("=")
        return [*([value] if equals else []), *self.words[1:]]

    @property
    def value(self) -> str | None:
        return next(iter(self.values), None)

    def sets(self, key: str) -> bool:
        """``--speculative-config.method mtp`` sets a part of ``--speculative-config``."""
        return self.key == key or self.key.startswith(key + ".")

    def same(self, other: Flag) -> bool:
        """Whether both say the same, however the flag and its JSON are spelled."""
        mine, others = ([read_json(word) if word.startswith("{") else word for word in flag.values]
                        for flag in (self, other))  # fmt: skip
        return (self.key, self.is_negated, mine) == (other.key, other.is_negated, others)


def parse_flags(argv: Sequence[str]) -> tuple[list[str], list[Flag]]:
    """The words before the first flag, and the flags. A negative number is a value."""
    head: list[str] = []
    groups: list[list[str]] = []
    for word in argv:
        if re.match(r"--?[A-Za-z]", word):
            groups.append([word])
        else:
            (groups[-1] if groups else head).append(word)
    return head, [Flag(tuple(group)) for group in groups]


def set_flag(argv: Sequence[str], name: str, value: FlagValue) -> list[str]:
    """`argv` with one flag set, in the place of the first flag that sets the same, else at the end. Those of ADDED
    replace no other."""
    head, flags = parse_flags(argv)
    new = Flag(flag_words(name, value))
    if new.key in ADDED:
        return [*argv, *([] if any(flag.same(new) for flag in flags) else new.words)]
    at = next((index for index, flag in enumerate(flags) if flag.sets(new.key)), len(flags))
    merged = [*flags[:at], new, *(flag for flag in flags[at:] if not flag.sets(new.key))]
    return [*head, *(word for flag in merged for word in flag.words)]


def drop_flags(argv: Sequence[str], *names: str) -> list[str]:
    head, flags = parse_flags(argv)
    return [*head, *(word for flag in flags if flag.key not in names for word in flag.words)]


def flag_value(argv: Sequence[str], name: str) -> str | None:
    """The first value of a flag; the last one given counts. None where it is absent or bare."""
    values = [flag.value for flag in parse_flags(argv)[1] if flag.key == name]
    return values[-1] if values else None


def served_name(argv: Sequence[str]) -> str:
    """The model's name in requests."""
    return flag_value(argv, SERVED_NAME) or argv[2]


def tls_flags(argv: Sequence[str]) -> list[str]:
    """Names of the flags that make a server speak TLS."""
    return [flag.key for flag in parse_flags(argv)[1] if re.match(r"--(enable-)?ssl-", flag.key)]


def flag_words(name: str, value: FlagValue) -> tuple[str, ...]:
    """None and True give a bare flag, False its opposite (`--x`, `--no-x`), a mapping compact JSON, a list one word an
    item, each as a value of its own would be written."""
    if value is None or value is True:
        return (name,)
    if value is False:
        return ("--" + name[5:] if name.startswith("--no-") else "--no-" + name[2:],)
    items = value if isinstance(value, list) else [value]
    # A number looks the same as JSON, true and a mapping do not.
    texts = (i if isinstance(i, str) else json.dumps(i, separators=(",", ":"), ensure_ascii=False) for i in items)
    return name, *texts


def environment(values: Mapping[str, Scalar]) -> dict[str, str]:
    """Text for each value; vLLM reads its switches as 0 and 1."""
    return {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in values.items()}


class Flags:
    """Typed access to a command line; of a flag that stands twice the last one counts."""

    def __init__(self, argv: Sequence[str], origin: str, origins: Mapping[str, str]) -> None:
        """origins: flag -> the file that sets it; origin: for all others."""
        self._flags, self._origin, self._origins = parse_flags(argv)[1], origin, origins
        self._read: set[str] = set()

    def origin(self, key: str) -> str:
        return self._origins.get(key, self._origin)

    def unread(self) -> tuple[str, ...]:
        """Flags that nobody asked for and that may take memory, as they were given."""
        from sparkpin.pins.reading import read_yaml  # slow to import, and most commands ask for no unread flag

        known = self._read | set(read_yaml(NEUTRAL)["flags"])
        return tuple(" ".join(flag.words) for flag in self._flags if flag.key.partition(".")[0] not in known)

    def last(self, key: str) -> Flag | None:
        self._read.add(key)
        return next((flag for flag in reversed(self._flags) if flag.key == key), None)

    def text(self, key: str) -> str | None:
        return found.value if (found := self.last(key)) else None

    def on(self, key: str, *, default: bool = False) -> bool:
        """Of a bare flag and its `--no-` form: Flag.key is the same for both."""
        return not found.is_negated if (found := self.last(key)) else default

    def refuse(self, **neutral: str) -> None:
        """Raise for each of these flags with any value but the one that has no effect."""
        for name, nothing in neutral.items():
            key = "--" + name.replace("_", "-")
            text = self.text(key)
            if text is not None and re.sub(r"\.0*$", "", text) != nothing:
                raise ManifestError(self.origin(key), key, text, KNOWN_EFFECT, next_step=NEXT)

    def number(self, key: str, *, auto: bool = False) -> int | None:
        text = self.text(key)
        if text is None:
            return None
        if auto and text in ("-1", "auto"):
            return AUTO
        with contextlib.suppress(ValueError):
            if (number := size(text)) > 0:
                return number
        expected = "a positive number such as 32768, 32k or 32K"
        raise ManifestError(self.origin(key), key, text, expected, next_step=NEXT)

    def fraction(self, key: str) -> float | None:
        text = self.text(key)
        if text is None:
            return None
        if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text) or not 0 < float(text) <= 1:
            raise ManifestError(self.origin(key), key, text, "a number above 0 and not above 1", next_step=NEXT)
        return float(text)

    def json(self, key: str) -> dict[str, Any]:
        """A flag's mapping, parts of it given as `--flag.part value` included. Dashes in its keys stay, except where
        vLLM 0.32 and 0.33 change them (engine/arg_utils.py, create_speculative_config)."""
        self._read.add(key)
        value: Any = {}
        for flag in self._flags:
            if flag.key == key:
                value = read_json(flag.value or "")
                if not isinstance(value, dict):
                    raise ManifestError(self.origin(key), key, flag.value, "a JSON object", next_step=NEXT)
            elif flag.key.startswith(key + ".") or (key == SPECULATION and flag.key in SHORTS):
                part = SHORTS.get(flag.key) or flag.words[0].partition("=")[0].partition(".")[2]
                value = {**value, part: read_json(flag.value) if flag.value else flag.value}
        return {name.replace("-", "_"): one for name, one in value.items()} if key == SPECULATION else value


def size(text: str) -> int:
    """A whole number, with k for 1,000 and K for 1,024. ValueError for any other text."""
    text = text.strip()
    number, unit = text[:-1], text[-1:]
    if unit in DECIMAL and re.fullmatch(r"[0-9]+(\.[0-9]+)?", number):
        return int(float(number) * DECIMAL[unit])
    return int(number) * BINARY[unit] if unit in BINARY and re.fullmatch("[0-9]+", number) else int(text)


def read_json(text: str) -> Any:
    """The value of a part, as vLLM 0.33 reads it (utils/argparse_utils.py): text where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

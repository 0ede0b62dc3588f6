"""The words of `vllm serve` compared with what a release of vLLM takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkpin.core.errors import short
from sparkpin.pins.drafters import SHORTS
from sparkpin.pins.schema import Stage
from sparkpin.pins.vllm_flags import SPECULATION, Flag, parse_flags, read_json
from sparkpin.recipes.finding import RecipeFinding, error, warning
from sparkpin.recipes.release import VllmRelease, nearest, nearest_few


@dataclass(frozen=True)
class PlannedServer:
    """A server to be."""

    model: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    release: VllmRelease
    gpu: bool
    packages: frozenset[str] | None  # distributions in its image; None where they are not known
    templates: frozenset[str]
    chain: tuple[Stage, ...] | None  # the stages of its image; None where they are not known

    @property
    def flags(self) -> list[tuple[str, Flag]]:
        """Each flag that is known, by the name that its release knows it by."""
        found = [(self.release.flag(flag.words[0]), flag) for flag in parse_flags(self.argv)[1]]
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

    def number(self, name: str) -> float | None:
        try:
            return float(self.value(name) or "")
        except ValueError:
            return None

    @property
    def speculation(self) -> dict[str, Any]:
        """--speculative-config, whether it stands as JSON, in parts or in flags of its keys."""
        found: dict[str, Any] = {}
        for name, flag in self.flags:
            if name in SHORTS:
                found[SHORTS[name]] = read_json(flag.value or "")
            if name != SPECULATION:
                continue
            part = flag.words[0].partition("=")[0].partition(".")[2]
            value = read_json(flag.value or "")
            found |= {part: value} if part else (value if isinstance(value, dict) else {})
        return found


def findings(served: PlannedServer) -> Iterator[RecipeFinding]:
    head, flags = parse_flags(served.argv)
    for word in head[3:]:
        yield error(f"{word!r} is no flag, and the model stands there already", "remove it")
    for flag in flags:
        shown = flag.words[0].partition("=")[0]
        name = served.release.flag(flag.words[0])
        if name is None:
            hint = nearest(shown.replace("_", "-"), served.release.names) or "leave it out"
            yield error(f"vLLM {served.release.wanted} has no flag {shown}", hint)
            continue
        yield from of_flag(served, name, flag)
    yield from of_drafts(served)
    yield from of_parsers(served)
    yield from of_environment(served)


def of_flag(served: PlannedServer, name: str, flag: Flag) -> Iterator[RecipeFinding]:
    entry, (word, _, attached) = served.release.flags[name], flag.words[0].partition("=")
    if word.startswith("-O"):  # -O3
        attached = flag.words[0][2:]
    values = [value for value in (attached, *flag.words[1:]) if value]
    if entry["kind"] in ("switch", "bare") and values:
        yield error(f"{word} takes no value, and {' '.join(values)!r} follows it", "remove what follows it")
    elif entry["kind"] == "value" and not values:
        yield error(f"{word} needs a value", f"write one after {word}")
    known = entry.get("values", ())
    if known and "." not in word:
        for value in values:
            if value.lower() not in {one.lower() for one in known} | {"none"}:
                unknown = warning if entry.get("open") else error
                hint = nearest(value, known) or f"it has {', '.join(known)}"
                yield unknown(f"{word} {value}: not among what vLLM {served.release.wanted} has", hint)


def of_drafts(served: PlannedServer) -> Iterator[RecipeFinding]:
    # vLLM 0.32 and 0.33 change dashes of these keys (engine/arg_utils.py)
    plan = {key.partition(".")[0].replace("-", "_"): value for key, value in served.speculation.items()}
    if not isinstance(model := plan.get("model"), str | None):
        yield error(f"{SPECULATION}: got the model {short(model)}, expected a repository of the Hub, as text")
    for key in sorted(plan.keys() - {*served.release.speculative_keys}):
        hint = nearest(key, served.release.speculative_keys)
        yield error(f"{SPECULATION}: vLLM {served.release.wanted} has no key {short(key)}", hint)


def of_parsers(served: PlannedServer) -> Iterator[RecipeFinding]:
    vllm, release = f"vLLM {served.release.wanted}", served.release
    for flag, plugin, known in (
        ("--tool-call-parser", "--tool-parser-plugin", release.tool_parsers),
        ("--reasoning-parser", "--reasoning-parser-plugin", release.reasoning_parsers),
    ):
        name = served.value(flag)
        if name and name not in known and served.value(plugin) is None:
            yield error(f"{flag} {name}: {vllm} has no such parser", nearest_few(name, known))
    chooses, parser = served.value("--enable-auto-tool-choice"), served.value("--tool-call-parser")
    if chooses is not None and parser is None:
        yield error("--enable-auto-tool-choice without --tool-call-parser: vLLM refuses", "add a parser")
    if parser is not None and chooses is None:
        text = f"--tool-call-parser {parser} does nothing without --enable-auto-tool-choice"
        yield warning(text, "add --enable-auto-tool-choice")
    template = served.value("--chat-template")
    if template and "{" not in template and template.rpartition("/")[2] not in served.templates:
        hint = "add it, or leave the flag out: the model's repository has a template of its own"
        yield error(f"--chat-template {template}: no mod and no template of this project brings that file", hint)
    method, methods = served.speculation.get("method"), release.speculative_methods
    if isinstance(method, str) and methods and method.lower() not in {one.lower() for one in methods}:
        yield error(f"--speculative-config: {vllm} has no method {method!r}", nearest(method, methods))


def of_environment(served: PlannedServer) -> Iterator[RecipeFinding]:
    for name in served.env:
        if name.startswith("VLLM_") and name not in served.release.environment:
            hint = nearest(name, served.release.environment, 0.87)
            text = f"vLLM {served.release.wanted} does not know this variable"
            yield RecipeFinding("warning", f"env.{name}", text, hint)

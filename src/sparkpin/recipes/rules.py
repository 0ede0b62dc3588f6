"""What is wrong with a server to be: each rule is a small function that yields findings, and RULES has all of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from sparkpin.checkpoint.shapes import config_ahead
from sparkpin.core.errors import WHOLE, ManifestError, SparkpinError, clipped, short
from sparkpin.core.terminal import count
from sparkpin.memory.division import HYBRID_PIPELINE, division_faults
from sparkpin.memory.plan import SPARK_TOTAL
from sparkpin.pins import drafters, manifests, mods, nodes, schema, values, vllm_command
from sparkpin.pins.vllm_flags import CACHE_TYPE, MODEL_PATH, SPECULATION, Flag, Flags, flag_value, parse_flags
from sparkpin.recipes.shell import FACTS
from sparkpin.recipes.sizes import weights_here
from sparkpin.recipes.vllm_parser import Refused, VllmParser, nearest, parser_of

LONGEST = 1000  # characters of each part that is shown; the names of all parsers take 600
LACKS = "a lock: "  # as `manifests` begins what it wants of a pin that nobody has locked
Severity = Literal["error", "warning", "note"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note")
PLUGINS: dict[str, str] = FACTS["parser_plugins"]
TEMPLATE = "--chat-template"
NO_FILE = ("", "none", "auto", "vllm")
# Models with linear attention or state-space layers beside full attention.
HYBRID = re.compile(FACTS["linear_attention"], re.IGNORECASE)
COMPARISON = re.compile(r"([<>]=?) *(\d+(?:\.\d+)?)")
OR = "unset or "
THREAD = re.compile(r"(?:\S+/)?(\S+)#(\d+)")


@dataclass(frozen=True)
class RecipeFinding:
    """error: it does not start, or not as it is meant; warning: it has broken for others, or does something else than
    it seems; note: worth knowing."""

    severity: Severity
    key: str  # of the file
    text: str
    hint: str = ""  # what mends it
    step: str = ""  # the command to type next, before any other

    def __str__(self) -> str:
        hint = self.hint or (self.step and f"next: {self.step}")
        key, text, hint = (clipped(part, LONGEST) for part in (self.key, self.text, hint))
        return f"{self.severity}: {key}: {text}" + (f"; {hint}" if hint else "")


# Of the command, which most findings are about.
error, warning = partial(RecipeFinding, "error", "command"), partial(RecipeFinding, "warning", "command")


def of_error(error: SparkpinError, key: str = WHOLE, *, file: str = "") -> RecipeFinding:
    """key: that led to it, for what is wrong in another file than the recipe's own `file` (empty: in none)."""
    if not isinstance(error, ManifestError):
        return RecipeFinding("error", key, error.message, error.next_step)
    step = error.next_step if error.next_step.startswith(("invoke add", "invoke lock", "curl ")) else ""
    if step and not step.startswith("invoke add"):  # what is not here yet is no mistake
        return RecipeFinding("note", key, error.expected.removeprefix(LACKS), step=step)
    elsewhere = file != "" and not file.endswith(error.file)
    text = error.message if elsewhere else error.fault
    is_plain = step or error.next_step.startswith((f"correct {error.key} in ", f"correct {file},"))
    meant = nearest(error.key.rpartition(".")[2], error.known)  # of a key that nobody knows
    hint = meant or ("" if is_plain else error.next_step)
    return RecipeFinding("error", key if elsewhere else error.key, text, hint, step)


def ordered(findings: list[RecipeFinding]) -> list[RecipeFinding]:
    """Errors first, each once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: ORDER.index(finding.severity))


@dataclass(frozen=True)
class PlannedServer:
    """A server to be, on a stack of a project. chain: the stages of its image; family: as a recipe of ours says it."""

    project: Path
    model: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stack: schema.Stack
    mods: Sequence[str]
    chain: Sequence[schema.Stage]
    family: str | None = None

    @cached_property
    def parser(self) -> VllmParser:
        return parser_of(self.stack.vllm)

    @cached_property
    def packages(self) -> frozenset[str] | None:
        """Distributions in its image; None for a stack that was never locked."""
        if not (self.project / f"pins/stacks/{self.stack.name}.lock").is_file():
            return None
        wheels = manifests.read_lock(schema.StackLock, self.project, self.stack.name).wheels
        return frozenset(wheel.name.lower().replace("_", "-") for wheel in wheels)

    @cached_property
    def issues(self) -> list[schema.KnownIssue]:
        """The known ones that it has."""
        return [issue for issue in manifests.load_known_issues(self.project) if applies(issue, self)]

    @cached_property
    def flags(self) -> list[tuple[str | None, Flag]]:
        """Each flag with the name that its vLLM knows it by."""
        return [(self.parser.flag(flag.words[0]), flag) for flag in parse_flags(self.argv)[1]]

    def value(self, name: str) -> str | None:
        """The last one given counts; "" for a bare flag, None for one that is absent or negated.

        name: `--no-X` is there where X is negated.
        """
        no = name.startswith("--no-")
        wanted = f"--{name[5:]}" if no else name
        found = [flag for known, flag in self.flags if known == wanted]
        if not found or found[-1].words[0].startswith("--no-") != no:
            return None
        return found[-1].value or ""

    def setting(self, name: str) -> str | None:
        """Of a flag, a part of its JSON after a dot, or a variable, which a pattern may mean; None where it is not
        set."""
        flag, _, part = name.partition(".")
        if part:
            parts = self.json(flag)
            return str(parts[part]) if part in parts else None
        return self.value(flag) if flag.startswith("-") else self.env.get(self.named(flag))

    def named(self, pattern: str) -> str:
        """The variable that a pattern means; the pattern itself where none is set."""
        return next((name for name in self.env if fnmatchcase(name, pattern)), pattern)

    def json(self, flag: str) -> dict[str, Any]:
        """All that sets it, in one; empty for what is no JSON, which `of_words` finds."""
        with contextlib.suppress(ManifestError):
            return Flags(self.argv, "the command", {}).json(flag)
        return {}


def of_words(served: PlannedServer) -> Iterator[RecipeFinding]:
    for word in parse_flags(served.argv)[0][3:]:
        yield error(f"{word!r} is no flag, and the model stands there already", "remove it")
    parts: dict[str, list[Flag]] = {}
    for name, flag in served.flags:
        shown = flag.words[0].partition("=")[0]
        if name is None:
            hint = nearest(shown.replace("_", "-"), served.parser.flags) or "leave it out"
            yield error(f"vLLM {served.parser.wanted} has no flag {shown}", hint)
        else:  # those that set a part of one flag are judged together
            parts.setdefault(name if "." in shown else " ".join(flag.words), []).append(flag)
    for some in parts.values():
        yield from of_flag(served, served.parser.flag(some[0].words[0]) or "", some)


def of_flag(served: PlannedServer, name: str, flags: list[Flag]) -> Iterator[RecipeFinding]:
    """Of what sets one flag: what its parser refuses, then what vLLM refuses of what its parser took."""
    parser, given = served.parser, flags[0].value or ""
    try:
        value = parser.parsed(flags)
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                yield from of_value(served, name, str(one))
        parser.require(name, value)
    except Refused as refused:
        fault = str(refused).partition(": ")[2] or str(refused)
        if re.fullmatch(r"\{\w[\w-]*\}", given) or (given[:1] == "{" and "json" in fault.lower()):
            return  # said otherwise
        shown = f"{flags[0].words[0].partition('=')[0]} {short(given)}".strip()
        hint = nearest(given, map(str, parser.flags[name].get("choices", ())))
        yield error(f"{shown}: vLLM {parser.wanted} refuses it: {fault}", hint)


def of_value(served: PlannedServer, name: str, value: str) -> Iterator[RecipeFinding]:
    """Of a value that the parser took: a name that this vLLM has not, a file that nobody brings."""
    entry = served.parser.flags[name]
    known = entry.get("known", ())
    brought = FACTS["values_of_packages"].get(name, {}).get(value) in (served.packages or ())
    is_named = brought or value.lower() in {*map(str.lower, known), *NO_FILE} or "." in value
    is_known = any(next(iter(issue.when)) == name for issue in served.issues)  # with what to do
    if known and not is_named and not is_known and served.value(PLUGINS.get(name, name)) in (None, value):
        unknown = warning if entry.get("open") else error
        few = f"it has {', '.join(known)}" if len(known) < 100 and unknown is error else ""
        text = f"{name} {value}: not among what vLLM {served.parser.wanted} has"
        yield unknown(text, nearest(value, known) or few)
    if lacks_file(name, value, served.model, mods.template_names(served.project, served.mods)):
        why = ": the model's repository has a template of its own" if name == TEMPLATE else " with its parser"
        hint = f"leave the flag out, as `invoke add` does{why}"
        yield error(f"{name} {value}: nothing of this project brings that file to the server", hint)


def lacks_file(flag: str, value: str, model: str, templates: Collection[str]) -> bool:
    """Whether a value names a file, or a repository, that no container has: it has the checkpoint, the templates of
    mods, and no network."""
    if flag not in FACTS["flags_of_files"] or value.lower() in NO_FILE or value in (MODEL_PATH, model):
        return False
    if flag == TEMPLATE and ("{" in value or value.rpartition("/")[2] in templates):
        return False
    return not value.startswith(f"{MODEL_PATH}/")


def of_environment(served: PlannedServer) -> Iterator[RecipeFinding]:
    gone: dict[str, str] = FACTS["env_that_became_flags"]
    known = [*served.parser.environment, *(next(iter(issue.when)) for issue in served.issues)]
    for name in served.env:
        if name.startswith("VLLM_") and not any(fnmatchcase(name, pattern) for pattern in known):
            flag = next((flag for pattern, flag in gone.items() if fnmatchcase(name, pattern)), "")
            hint = f"write {flag}" if flag else nearest(name, served.parser.environment, 0.87)
            text = f"vLLM {served.parser.wanted} does not know this variable"
            yield RecipeFinding("warning", f"env.{name}", text, hint)


def of_known_issues(served: PlannedServer) -> Iterator[RecipeFinding]:
    for issue in served.issues:
        name = next(iter(issue.when))
        key = "command" if name.startswith("-") else f"env.{served.named(name)}"
        text = sentence(issue, served.setting).replace(name, served.named(name), 1)
        yield RecipeFinding(issue.severity, key, text, issue.do)


def applies(issue: schema.KnownIssue, served: PlannedServer) -> bool:
    return bool(
        issue.gpu in (None, served.stack.gpu is not None)
        and (not issue.hybrid or HYBRID.search(served.model))
        and (not issue.models or any(fnmatchcase(served.model.lower(), model.lower()) for model in issue.models))
        and schema.is_within(issue.vllm, served.parser.wanted)
        and (not issue.lacks or (served.packages is not None and issue.lacks not in served.packages))
        and holds(issue, served.setting)
    )


def holds(issue: schema.KnownIssue, value: Callable[[str], str | None]) -> bool:
    """Whether all rows of `when` do. value: what is so; None for what is not said or not known."""
    return all(fits(condition, value(name)) for name, condition in issue.when.items())


def fits(condition: str, value: str | None) -> bool:
    """`unset or CONDITION` is for what is at fault by default, too."""
    if value is None:
        return condition == "unset" or condition.startswith(OR)
    condition = condition.removeprefix(OR)
    if condition in ("set", "unset"):
        return condition == "set"
    if not (found := COMPARISON.fullmatch(condition)):
        return fnmatchcase(value.lower(), condition.lower())
    try:
        number, limit = float(value), float(found[2])
    except ValueError:
        return False
    return {"<": number < limit, "<=": number <= limit, ">": number > limit, ">=": number >= limit}[found[1]]


def sentence(issue: schema.KnownIssue, value: Callable[[str], str | None]) -> str:
    """In one line, with the threads that it is known from."""
    name = next(iter(issue.when))
    found = value(name)
    subject = f"no {name}" if found is None else f"{name} {found}".strip()
    threads = [f"{thread[1]}#{thread[2]}" for one in issue.evidence if (thread := THREAD.fullmatch(one.source))]
    return f"{subject}: {issue.text}" + (f" ({', '.join(threads)})" if threads else "")


def of_draft(served: PlannedServer) -> Iterator[RecipeFinding]:
    """Of a second model that the command names by its repository, as recipes of ours never do."""
    draft = drafters.second_model(plan := served.json(SPECULATION))
    if not isinstance(draft, str) or draft == served.model or draft.startswith(MODEL_PATH):
        return
    pins = [pin for pin in manifests.readable_models(served.project)[0] if pin.repositories[pin.base].repo == draft]
    for pin in pins:
        yield from map(of_error, drafters.method_faults(plan, pin.drafts, "command") if pin.drafts else ())


def of_cache(served: PlannedServer) -> Iterator[RecipeFinding]:
    if text := values.lacks_mod(served.value(CACHE_TYPE), served.chain):
        yield warning(text, f"stage {values.STAGE} has it; otherwise leave the flag out")


def of_family(served: PlannedServer) -> Iterator[RecipeFinding]:
    """Of a parser that is another one than the model's family has, or may be missing: calls would be text."""
    family = vllm_command.family_of(manifests.load_families(served.project), served.model, served.family)
    if not family and None in (served.value("--reasoning-parser"), served.value("--tool-call-parser")):
        text = (
            f"no family in pins/families.yaml has {served.model}: its reasoning and tool calls may appear in the answer"
        )
        yield warning(text, "name the --reasoning-parser and the --tool-call-parser of its card, if there are any")
    for choice in family.serve if family else ():
        flag, given, known = served.parser.flags.get(choice.flag, {}), served.value(choice.flag), str(choice.value)
        same = {flag.get("same", {}).get(name, name) for name in (given, known)}
        if "known" in flag and given and len(same) > 1 and not given.startswith(f"{known}_"):  # a variant of the same
            text = f"{choice.flag} {given}: models of the family {family.name if family else ''} write for {known}"
            yield warning(text, f"{choice.flag} {known}, or leave the flag out")


def of_record(served: PlannedServer) -> Iterator[RecipeFinding]:
    known, wanted = served.parser.version, served.parser.wanted
    if known != wanted:
        text = f"nothing is recorded of vLLM {wanted}: compared with {known}"
        yield RecipeFinding("note", "stack", text, "python benchmarks/vllm_parser.py records a release")


def of_machines(served: PlannedServer) -> Iterator[RecipeFinding]:
    """Of layers or heads that several machines cannot divide."""
    if (machines := nodes.nodes_of(served.argv)) == 1:
        return
    if (flag_value(served.argv, nodes.PIPELINE) or "1") != "1" and HYBRID.search(served.model):
        yield error(f"{nodes.PIPELINE}: {HYBRID_PIPELINE}", f"{nodes.PIPELINE} 1")
        return
    try:
        for fault in division_faults(config_ahead(served.project, served.model) or {}, served.argv, (), "the recipe"):
            yield of_error(fault)
    except (ManifestError, ValueError):  # a model that no plan here knows; numbers that are none
        text = f"whether {machines} machines can share {served.model} is not checked: pins/shapes does not know it"
        yield RecipeFinding("note", "command", text, "invoke up checks it by config.json")


def of_weights(served: PlannedServer) -> Iterator[RecipeFinding]:
    """Of a model that is too large, by what is known of its weights, else by its name."""
    if not served.stack.gpu:
        return
    size, source = weights_here(served.project, served.model)
    if not size or served.value("--quantization") in FACTS["quantised_while_loading"]:  # to fewer bytes than are known
        size, source = weights_by_name(served), "its name"
    if not size:
        text = "its size is unknown: neither a lock, nor pins/shapes, nor its name has it"
        yield RecipeFinding("note", "model", text, "invoke plan prints it once it is locked")
    if size > SPARK_TOTAL * (machines := nodes.nodes_of(served.argv)):
        text = f"{served.model}: its weights are about {size / 1e9:.0f} GB (by {source})"
        text += f", and {count(machines, 'machine')} of 128 GB cannot hold them"
        yield error(text, "name more machines, or take a smaller model")


def weights_by_name(served: PlannedServer) -> int:
    """Billions of weights, with so many bits each; 0 where nobody can tell."""
    name = served.model.rpartition("/")[2]
    billions = re.search(r"(?<![\dA-Za-z.])(\d+(?:\.\d+)?)B(?![a-z])", name, re.IGNORECASE)
    text, sizes = f"{name} {served.value('--quantization') or ''}", FACTS["bits_by_name"]
    bits = min((bits for pattern, bits in sizes.items() if re.search(pattern, text, re.IGNORECASE)), default=16)
    return int(float(billions[1]) * 1e9 * bits / 8) if billions else 0


RULES: tuple[Callable[[PlannedServer], Iterator[RecipeFinding]], ...] = (
    of_words, of_environment, of_known_issues, of_draft, of_cache, of_family, of_record, of_machines, of_weights,
)  # fmt: skip


def findings(served: PlannedServer) -> list[RecipeFinding]:
    return [finding for rule in RULES for finding in rule(served)]

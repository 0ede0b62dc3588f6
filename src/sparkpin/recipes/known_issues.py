"""Settings that are known to break: those of pins/known_issues.yaml, and what follows from the stack's own files."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from sparkpin.pins.drafters import second_model
from sparkpin.pins.nodes import PIPELINE, TENSOR, nodes_of
from sparkpin.pins.schema import KnownIssue, is_within
from sparkpin.pins.values import STAGE, lacks_mod
from sparkpin.pins.vllm_flags import CACHE_TYPE, tls_flags
from sparkpin.recipes.finding import RecipeFinding, error, warning
from sparkpin.recipes.flags import PlannedServer

HYBRID = re.compile(r"qwen3\.[5-9]|qwen3-(coder-)?next|nemotron-(3|h)|granite-4|jamba|falcon-h1|mamba", re.IGNORECASE)
"""Models with linear attention or state-space layers beside full attention."""
PACKAGES = {
    "--load-format fastsafetensors": "fastsafetensors",
    "--load-format instanttensor": "instanttensor",
    "--load-format runai_streamer": "runai-model-streamer",
    "--load-format tensorizer": "tensorizer",
    "--distributed-executor-backend ray": "ray",
    "--moe-backend b12x": "b12x",
    "--linear-backend b12x": "b12x",
    "--attention-backend b12x": "b12x",
}
"""Values that need a distribution."""
PARALLEL = (TENSOR, PIPELINE, "--data-parallel-size")
COMPARISON = re.compile(r"([<>]=?) *(\d+(?:\.\d+)?)")
OR = "unset or "
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
THREAD = re.compile(r"(?:\S+/)?(\S+)#(\d+)")


def findings(served: PlannedServer, issues: Iterable[KnownIssue]) -> Iterator[RecipeFinding]:
    yield from known(served, issues)
    draft = second_model(served.speculation)
    if isinstance(draft, str) and not draft.startswith("/model"):
        text = f"the draft model {draft} is not fetched, and a container has no network"
        yield error(text, f"pin it and write `drafter: {draft}` (docs/drafters.md), or leave --speculative-config out")
    yield from machine(served)


def known(served: PlannedServer, issues: Iterable[KnownIssue]) -> Iterator[RecipeFinding]:
    for issue in issues:
        if of_server(issue, served) and holds(issue, value := said(served)):
            name = next(iter(issue.when))
            key = "command" if name.startswith("-") else f"env.{name}"
            yield RecipeFinding(issue.severity, key, told(issue, value), issue.do)


def of_server(issue: KnownIssue, served: PlannedServer) -> bool:
    """Whether its model, its stack and its vLLM are those of the issue."""
    version = served.parser.wanted
    return (
        issue.gpu in (None, served.gpu)
        and (not issue.hybrid or HYBRID.search(served.model) is not None)
        and (not issue.models or any(fnmatchcase(served.model.lower(), model.lower()) for model in issue.models))
        and is_within(issue.vllm, version)
        and (not issue.lacks or (served.packages is not None and issue.lacks not in served.packages))
    )


def said(served: PlannedServer) -> Callable[[str], str | None]:
    """What a server's words and variables say of a name; None where they do not."""

    def value(name: str) -> str | None:
        flag, _, part = name.partition(".")
        if part:
            return str(served.speculation[part]) if part in served.speculation else None
        return served.value(flag) if flag.startswith("-") else served.env.get(flag)

    return value


def holds(issue: KnownIssue, value: Callable[[str], str | None]) -> bool:
    """Whether all rows of `when` do. value: what is so; None for what is not said or not known."""
    return all(fits(condition, value(name)) for name, condition in issue.when.items())


def fits(condition: str, value: str | None) -> bool:
    """`unset or CONDITION` is for what is at fault by default, too."""
    if condition.startswith(OR) and value is None:
        return True
    condition = condition.removeprefix(OR)
    if condition in ("set", "unset") or value is None:
        return condition == ("unset" if value is None else "set")
    if not (found := COMPARISON.fullmatch(condition)):
        return fnmatchcase(value.lower(), condition.lower())
    try:
        return bool(COMPARE[found[1]](float(value), float(found[2])))
    except ValueError:
        return False


def told(issue: KnownIssue, value: Callable[[str], str | None]) -> str:
    """In one line, with the threads that it is known from."""
    name = next(iter(issue.when))
    seen = value(name)
    subject = f"no {name}" if seen is None else f"{name} {seen}".strip()
    threads = [f"{found[1]}#{found[2]}" for one in issue.evidence if (found := THREAD.fullmatch(one.source))]
    return f"{subject}: {issue.text}" + (f" ({', '.join(threads)})" if threads else "")


def machine(served: PlannedServer) -> Iterator[RecipeFinding]:
    for flag in PARALLEL if nodes_of(served.argv) == 1 else ():
        if (count := served.value(flag)) not in (None, "0", "1"):
            yield error(f"{flag} {count}: one machine has one GPU here", f"{flag} 1, or the key `nodes`")
    for words, package in PACKAGES.items():
        flag, _, value = words.partition(" ")
        lacks = served.packages is not None and package not in served.packages
        if lacks and (served.value(flag) or "").lower() == value:
            yield error(f"{words}: the stack's lock has no {package}", "leave the flag out")
    for flag in tls_flags(served.argv):
        text = f"{flag}: the images here are asked by plain HTTP, so `recipe import` leaves it out"
        yield warning(text, "a proxy before the server can do TLS")
    if served.chain and (text := lacks_mod(served.value(CACHE_TYPE), served.chain)):
        yield warning(text, f"stage {STAGE} has it; else leave the flag out")

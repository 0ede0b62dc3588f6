"""The task `roofline`: a recipe's decode step or the published chain, as a table or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host import machine as host
from sparkpin.measure.bench.acceptance import PUBLISHED, Acceptance, acceptance_of
from sparkpin.measure.roofline.published import CHAIN, MODEL, OTHERS, SHORT, Published, ceiling_of, model_published
from sparkpin.measure.roofline.reads import (
    DecodeModel,
    Link,
    Read,
    Roofline,
    accepted_share,
    best_drafts,
    chance_of,
    model_of,
    pipelined,
    with_drafts,
)
from sparkpin.measure.roofline.reads import roofline as make
from sparkpin.pins import manifests, schema
from sparkpin.serve.memory import recipe as memory

GB = 1e9
SPARK = 273 * GB  # bytes a second, nominally; the default of --bandwidth
COLUMNS = ("read in a step", "MB", "times", "MB a step", "share", "note")
CHAIN_COLUMNS = ("stage", "what", "GB a step", "ceiling", "same experts", "published", "of the ceiling", "GB/s then")
OTHER_COLUMNS = ("model", "what", "machines", "published", "ceiling", "same experts", "of the ceiling", "date")
NODE_COLUMNS = ("nodes", "how", "GB a step", "ms on the link", "ms a step", "ceiling", "of one")
ONE_USER = "the table of several machines and the published chain are of one user"
LATENCY = "55"
"""Microseconds of a small all-reduce by NCCL over RoCE, the default of --link-latency: 54 to 64 on four Sparks
(local-inference-lab/b12x#295), 41 of 8 KB on two (MiaAI-Lab/Qwen3.8-Flash-Next-Dual-DGX-Sparks#22)."""
LINK = "12.25"
"""GB/s, the default of --link-bandwidth: 98 Gb/s, reported for one half of a port; both halves have 161."""
NODES = (2, 4)
USERS, CHANCES = (1, 4, 8, 16), (0.5, 0.7, 0.8, 0.9)
"""Of the table of draft lengths. Chances: of a drafted token, where those before it were accepted."""
DRAFT_COLUMNS = ("users", *(f"{chance:.0%}" for chance in CHANCES))


@dataclass(frozen=True, slots=True)
class RooflineOptions:
    bandwidth: float  # bytes a second
    context: int  # tokens
    accepted: float | None  # share of the drafted tokens, None where nobody said one
    link: Link
    users: int = 1

    def both(self, model: DecodeModel, accepted: Acceptance) -> tuple[Roofline, Roofline]:
        """With uniform routing, and as if all tokens of a user's step reached the same experts."""
        known: dict[str, Any] = {"context": self.context, "bandwidth": self.bandwidth, "link": self.link}
        made = partial(make, model, accepted=accepted.share, users=self.users, **known)
        return made(), made(same_experts=True)

    def best(self, model: DecodeModel, chance: float, users: int) -> tuple[Roofline, Roofline]:
        """The best draft length at either end of routing. chance: of a drafted token, after accepted ones."""
        known: dict[str, Any] = {"context": self.context, "bandwidth": self.bandwidth, "link": self.link}
        made = partial(best_drafts, model, chance, users=users, **known)
        return made(), made(same_experts=True)


def asked(
    *,
    bandwidth: str,
    context: int,
    accepted: str,
    link_latency: str = LATENCY,
    link_bandwidth: str = LINK,
    users: int = 1,
) -> RooflineOptions:
    if users < 1:
        raise InputError(f"--users: saw {users}, wanted 1 or more", next_step="--users 8")
    share = number("accepted", accepted, "0.79", least=0) if accepted else None
    if share is not None and share > 1:
        raise InputError(f"--accepted: saw {accepted!r}, wanted a share from 0 to 1", next_step="--accepted 0.79")
    latency = number("link-latency", link_latency, LATENCY, least=0) / 1e6
    link = Link(latency, number("link-bandwidth", link_bandwidth, LINK) * GB)
    return RooflineOptions(number("bandwidth", bandwidth, "273") * GB, context, share, link, users)


def number(option: str, text: str, example: str, least: float = math.ulp(0)) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        wanted = "a number above 0" if least else "a number, 0 or more"
        raise InputError(f"--{option}: saw {text!r}, wanted {wanted}", next_step=f"for example --{option} {example}")
    return value


def roofline(
    asked: RooflineOptions,
    *,
    recipe: str | None,
    stage: str | None,
    measured: str,
    as_json: bool,
    nodes: int | None = None,
) -> None:
    """Of one stage of a recipe; of the 122B the published chain, too. nodes: as if the recipe were for so many
    machines."""
    paths = Paths.from_env()
    speed = number("measured", measured, "38.4") if measured else None
    chosen = manifests.load_recipe(paths.project, recipe or host.default_recipe(paths.project))
    chain = manifests.load_chain(paths.project, stage or chosen.stage)
    stack = manifests.load_stack(paths.project, chosen.stack)
    known = memory.known_of(paths, chosen, stack, chain, nodes=nodes)
    model = model_of(known.tensors, known.geometry, known.settings, known.loading, symmetric=known.symmetric)
    pin = manifests.model_of(paths.project, chosen)
    drafts = pin.drafter.drafts if pin.drafter else None
    share = (
        acceptance_of(paths, chosen.name, chain[-1].name, model.drafted, drafts)
        if asked.accepted is None and model.drafted
        else said(asked)
    )
    chance = chance_of(share.share, share.drafts or model.drafted)
    if model.drafted:
        share = replace(share, share=accepted_share(chance, model.drafted))
    made, same = asked.both(model, share)
    best = asked.best(model, chance, asked.users) if model.draft_layers else ()
    lengths = list(draft_lengths(asked, model)) if model.draft_layers else []
    several = list(over_nodes(asked, known, share, model.drafted)) if asked.users == 1 else []
    is_published = pin.name == MODEL and asked.users == 1
    if as_json:
        value: dict[str, Any] = {"recipe": chosen.name, "stage": chain[-1].name, **to_json(made, same, speed)}
        value["accepted_from"] = share.origin if made.drafted else None
        value["published"] = bool(known.notes)
        value["best_drafted"] = [one.drafted for one in best]
        value["draft_lengths"] = [
            {"users": users, "chance": likely, "drafted": one.drafted, "ceiling": one.ceiling}
            | {"drafted_same_experts": other.drafted, "ceiling_same_experts": other.ceiling}
            for users, likely, one, other in lengths
        ]
        value["nodes"] = [
            {"nodes": count, "how": how, "step_seconds": one.step_seconds, "ceiling": one.ceiling}
            | {"link_seconds": one.link_seconds, "step_bytes": one.step_bytes}
            for count, how, one in several
        ]
        terminal.show(json.dumps(value, indent=2, sort_keys=True))
        return
    whom = "one user," if asked.users == 1 else f"{asked.users} users, each with"
    of = f"recipe {chosen.name}, stage {chain[-1].name}"
    terminal.show(f"Decode of {of}, {whom} {asked.context:,} tokens in the cache")
    terminal.table(COLUMNS, [row(read, made) for read in made.reads])
    whose = " (a DGX Spark's memory, nominally)" if asked.bandwidth == SPARK else ""
    each = f" on each of {model.ranks}" if model.ranks > 1 else ""
    linked = f", {terminal.figure(1e3 * made.link_seconds)} of them on the link" if made.link_seconds else ""
    terminal.show(
        f"{made.step_bytes / 1e6:,.3f} MB a step{each} at {asked.bandwidth / GB:g} GB/s{whose}: "
        f"{terminal.figure(1e3 * made.step_seconds)} ms{linked}"
    )
    if made.drafted:
        terminal.show(
            f"{made.step_tokens:.2f} tokens a step: {made.drafted} drafted, {percent(share)} of them accepted "
            f"({share.origin})"
        )
    step = "a step" if asked.users == 1 else "a user's step"
    other = f" with uniform routing, {same.ceiling:.1f} if all tokens of {step} reached the same experts"
    terminal.show(f"ceiling: {made.ceiling:.1f} tok/s{'' if math.isclose(made.ceiling, same.ceiling) else other}")
    if best:
        ends = " to ".join(f"{one.drafted} ({one.ceiling:.1f} tok/s)" for one in best)
        terminal.show(f"best draft length: {ends}, where a draft is accepted at {chance:.1%} after accepted ones")
    if speed is not None:
        part, implied = 100 * made.fraction(speed), made.implied(speed) / GB
        rate = f"{terminal.figure(implied)} GB/s of {asked.bandwidth / GB:g}"
        if math.isinf(implied):
            rate = "more than the link allows, however fast the memory is (--link-latency, --link-bandwidth)"
        told = f"{terminal.figure(part)} % of it: {rate}"
        terminal.show(f"measured: {speed:g} tok/s, {told}")
    if asked.bandwidth == SPARK and is_served_here(host.read_host(), stack):
        terminal.show(
            "note: this machine is no DGX Spark, so that is no ceiling of what is served here: --bandwidth takes the "
            "GB/s of its own memory, and a CPU reads from its cache what fits there"
        )
    if asked.users > 1 and (nodes or pin.name == MODEL):
        terminal.show(f"note: {ONE_USER}: leave --users out for them")
    for note in known.notes:
        terminal.show(f"note: {note}")
    if lengths:
        show_lengths(lengths)
    if several and (known.settings.platform == "cuda" or nodes):
        show_nodes(asked, several)
    if is_published:
        show_chain(asked)


def draft_lengths(asked: RooflineOptions, model: DecodeModel) -> Iterator[tuple[int, float, Roofline, Roofline]]:
    """Users, chance of a draft, and the best length with uniform routing and with a user's experts shared."""
    for users in sorted({*USERS, asked.users}):
        for chance in CHANCES:
            yield users, chance, *asked.best(model, chance, users)


def show_lengths(lengths: list[tuple[int, float, Roofline, Roofline]]) -> None:
    terminal.show(
        "Best draft length and its ceiling in tok/s of all users, uniform routing, by how many drafts are accepted "
        "after accepted ones (computed; docs/performance.md):"
    )
    rows: dict[int, list[str]] = {}
    for users, _, one, _ in lengths:
        rows.setdefault(users, [str(users)]).append(f"{one.drafted}: {one.ceiling:.1f}")
    terminal.table(DRAFT_COLUMNS, [tuple(row) for row in rows.values()])


def over_nodes(
    asked: RooflineOptions, known: memory.Known, accepted: Acceptance, drafted: int
) -> Iterator[tuple[int, str, Roofline]]:
    """The step of one user on one machine, then tensor-parallel on several, then with the layers in parts."""

    def model(ranks: int) -> DecodeModel:
        settings, loading = replace(known.settings, ranks=ranks), replace(known.loading, ranks=ranks)
        made = model_of(known.tensors, known.geometry, settings, loading, symmetric=known.symmetric)
        return with_drafts(made, drafted)

    alone = model(1)
    one, _ = asked.both(alone, accepted)
    yield 1, "", one
    for count in NODES:
        if not known.geometry.undivided(count):
            yield count, "tensor-parallel", asked.both(model(count), accepted)[0]
    for count in NODES:
        yield count, "layers in parts", pipelined(one, alone, count, asked.link)


def show_nodes(asked: RooflineOptions, several: list[tuple[int, str, Roofline]]) -> None:
    alone = several[0][2]
    latency, bandwidth = terminal.figure(1e6 * asked.link.latency), terminal.figure(asked.link.bandwidth / GB)
    terminal.show(f"On several, one user, {latency} microseconds an all-reduce, {bandwidth} GB/s on the link:")
    rows = [
        (
            str(count),
            how,
            f"{one.step_bytes / GB:.2f}",
            f"{1e3 * one.link_seconds:.1f}",
            f"{1e3 * one.step_seconds:.1f}",
            f"{one.ceiling:.1f}",
            f"{one.ceiling / alone.ceiling:.2f}x",
        )
        for count, how, one in several
    ]
    terminal.table(NODE_COLUMNS, rows)


def is_served_here(machine: host.Host, stack: schema.Stack) -> bool:
    """By something else than a Spark."""
    return not machine.is_spark and (stack.gpu is None or machine.has_gpu)


def published(
    asked: RooflineOptions,
    *,
    as_json: bool,
    recipe: str | None = None,
    stage: str | None = None,
    measured: str = "",
    nodes: int | None = None,
) -> None:
    """The published figures beside the ceilings of their stages; of a longer context than theirs the ceilings. With a
    recipe that recipe's decode, from the published shapes.

    Raises InputError for what is of one stage of a recipe, without one: stage, measured, nodes, more than one user.
    """
    if recipe:
        roofline(asked, recipe=recipe, stage=stage, measured=measured, as_json=as_json, nodes=nodes)
        return
    users = asked.users if asked.users > 1 else None
    given = {"--stage": stage, "--measured": measured, "--nodes": nodes, "--users": users}
    if others := [option for option, value in given.items() if value]:
        raise InputError(
            f"--published shows every stage of the published chain: saw {' and '.join(others)} beside it",
            next_step=f"say the --recipe, too, or leave --published out, or {' and '.join(others)}",
        )
    if as_json:
        rows = [
            {"stage": figure.stage, "what": figure.what, **to_json(made, same, speed)}
            for figure, made, same, speed in chain_of(asked)
        ]
        more = [asdict(one) | {"ceiling": made and made[0].ceiling} for one, made in others_of(asked)]
        terminal.show(json.dumps({"model": MODEL, "chain": rows, "others": more}, indent=2, sort_keys=True))
        return
    show_chain(asked)
    show_others(asked)


def chain_of(asked: RooflineOptions) -> Iterator[tuple[Published, Roofline, Roofline, float | None]]:
    """Last the published speed, where the context is as short as that of its prompts."""
    for figure in CHAIN:
        yield (
            figure,
            *asked.both(model_published(figure), said(asked)),
            figure.tokens if asked.context <= SHORT else None,
        )


def others_of(asked: RooflineOptions) -> Iterator[tuple[Published, tuple[Roofline, Roofline] | None]]:
    """With the context and the acceptance of each, where that is published."""
    return ((figure, ceiling_of(figure, asked.bandwidth, asked.link)) for figure in OTHERS)


def show_others(asked: RooflineOptions) -> None:
    terminal.show("Other published figures, each with its own context and acceptance (docs/published.md):")
    rows = []
    for figure, made in others_of(asked):
        both = [f"{one.ceiling:.1f}" for one in made] if made else ["-", "-"]
        part = f"{made[0].fraction(figure.tokens):.0%}" if made and figure.tokens else "-"
        model = figure.repo.rpartition("/")[2]
        rows.append((model, figure.what, str(figure.nodes), f"{figure.tokens:g}", *both, part, figure.date))
    terminal.table(OTHER_COLUMNS, rows)


def said(asked: RooflineOptions) -> Acceptance:
    """What was asked for; as published where nothing was."""
    return PUBLISHED if asked.accepted is None else Acceptance(asked.accepted, "--accepted")


def percent(accepted: Acceptance) -> str:
    """As many digits as a share of some hundred tokens has."""
    return f"{100 * accepted.share:.3g} %"


def show_chain(asked: RooflineOptions) -> None:
    terminal.show(
        f"The published chain of {MODEL}, in tok/s, at {asked.bandwidth / GB:g} GB/s with {asked.context:,} tokens in "
        f"the cache and {percent(said(asked))} of the drafted tokens accepted"
    )
    rows = []
    for figure, made, same, speed in chain_of(asked):
        ends = (f"{speed:g}", f"{made.fraction(speed):.0%}", f"{made.implied(speed) / GB:.0f}") if speed else ["-"] * 3
        sizes = f"{made.step_bytes / GB:.2f}", f"{made.ceiling:.1f}", f"{same.ceiling:.1f}"
        rows.append((figure.stage, figure.what, *sizes, *ends))
    terminal.table(CHAIN_COLUMNS, rows)
    short = f", and short ones: nothing to hold against more than {SHORT:,} tokens in the cache"
    whence = f"five prompts on one Spark, not measured here{short if asked.context > SHORT else ''}"
    terminal.show(f"published: {whence}; docs/roofline.md says what a ceiling assumes")


def row(read: Read, made: Roofline) -> tuple[str, ...]:
    return (
        read.what,
        f"{read.size / 1e6:,.3f}",
        f"{read.times:,.2f}".removesuffix(".00"),
        f"{read.bytes / 1e6:,.3f}",
        f"{read.bytes / made.step_bytes:.1%}",
        read.note,
    )


def to_json(made: Roofline, same: Roofline, measured: float | None) -> dict[str, Any]:
    """Bytes, bytes a second, tokens a second. same_experts: the ceiling if all tokens of a step reached the same."""
    value: dict[str, Any] = {
        **asdict(made),
        "reads": [asdict(read) | {"bytes": read.bytes} for read in made.reads],
        "step_bytes": made.step_bytes,
        "step_tokens": made.step_tokens,
        "ceiling": made.ceiling,
        "ceiling_same_experts": same.ceiling,
    }
    if measured is not None:
        implied = made.implied(measured)
        value |= {"measured": measured, "fraction": made.fraction(measured)}
        value["implied"] = None if math.isinf(implied) else implied  # JSON has no infinity
    return value

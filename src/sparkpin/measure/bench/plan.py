"""What is measured. Pure.

The five prompts are of the kinds and lengths of the ones that the published figures of the 122B come from; those texts
are not published, so these are our own. A sweep adds concurrency and longer prompts, as far as a release's flags allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparkpin.measure.bench.record import Cell
from sparkpin.pins.vllm_flags import Flags

PROMPTS = (
    ("Q&A", 256, "Why does the sea look blue from far away, but clear in a glass? Explain it to a curious adult."),
    (
        "Code",
        512,
        "Write a Python class `Interval` for closed intervals of integers: containment, intersection, union of "
        "overlapping ones, iteration, and a method that merges a list of intervals. With type hints and docstrings.",
    ),
    (
        "JSON",
        1024,
        "Invent a catalogue of twelve garden tools as one JSON array. Each entry is an object with the keys id, name, "
        "category, price_eur, weight_kg, materials (an array), in_stock and description (one sentence). Only the JSON.",
    ),
    (
        "Math",
        64,
        "A tank holds 840 litres. One pump fills it in 12 hours, another in 20. In how many hours do both together?",
    ),
    (
        "LongCode",
        2048,
        "Write a complete command line program in Python that keeps a household's budget in SQLite: accounts, "
        "categories, recurring payments, monthly reports as text tables, import from CSV, export to JSON, a budget for "
        "each category with warnings, undo of the last change, and tests for all of it with pytest. One file of code.",
    ),
)
LEAST = 1024
"""Tokens that a release must take for the five: an answer gets what the prompt leaves."""
SLACK = 16
"""Tokens before the end of the context where an answer has to end: drafts are shortened there, which ends vLLM 0.32's
engine on a CPU (docs/smoke.md)."""
LENGTHS = (128, 1024, 8192, 32768, 131072)
CONCURRENCIES = (1, 2, 4, 8, 16)
SWEEP_OUTPUT = 128
QUICK_OUTPUT = 32
MOST_PROMPT_TOKENS = 1 << 18
"""At once in a cell of the sweep: 16 prompts of 128K take a Spark the better part of an hour."""
VLLM_SEQUENCES = 256
"""What vLLM takes at a time, at least, where no flag says it."""


@dataclass(frozen=True)
class Limits:
    """Of a release: tokens of prompt and answer together, requests at a time."""

    tokens: int
    requests: int

    @classmethod
    def of(cls, argv: Sequence[str], config_tokens: int) -> Limits:
        """config_tokens: what the model's own configuration allows, for a command that does not say it."""
        flags = Flags(argv, "the release's command", {})
        tokens = flags.number("--max-model-len", auto=True)
        allowed = config_tokens if tokens is None or tokens < 0 else tokens
        return cls(allowed, flags.number("--max-num-seqs") or VLLM_SEQUENCES)


def cells_of(limits: Limits, *, quick: bool = False, whole: bool = False) -> tuple[Cell, ...]:
    """quick: short answers and few cells, to see that it works; whole: the model must not end its answers itself."""
    return (*prompt_cells(limits, quick, whole), *sweep_cells(limits, quick))


def prompt_cells(limits: Limits, quick: bool, whole: bool) -> Iterable[Cell]:
    for name, tokens, text in PROMPTS if limits.tokens >= LEAST else ():
        output = min(tokens, QUICK_OUTPUT) if quick else tokens
        yield Cell(name=name, kind="prompt", prompt=text, output_tokens=output, whole=whole)


def sweep_cells(limits: Limits, quick: bool) -> Iterable[Cell]:
    output = QUICK_OUTPUT if quick else SWEEP_OUTPUT
    for length in LENGTHS[:1] if quick else LENGTHS:
        if length + output + SLACK > limits.tokens:
            return
        fitting = [n for n in CONCURRENCIES if n <= limits.requests]
        for concurrency in dict.fromkeys([fitting[0], fitting[-1]]) if quick else fitting:
            if concurrency > 1 and concurrency * length > MOST_PROMPT_TOKENS:
                continue
            yield Cell(
                name=f"{length} x {concurrency}",
                kind="sweep",
                input_tokens=length,
                output_tokens=output,
                concurrency=concurrency,
                requests=3 if concurrency == 1 and not quick else 2 * concurrency,
                whole=True,
            )


@dataclass(frozen=True)
class BenchPlan:
    cells: tuple[Cell, ...]
    context: int  # tokens that the release takes, of prompt and answer together


@dataclass(frozen=True)
class Step:
    """One run of the load generator."""

    cell: Cell
    counts: bool
    requests: int
    output_tokens: int
    seed: int  # of a sweep's random texts, another in each step, so that no prefix cache answers for the model


def steps_of(cells: Sequence[Cell]) -> tuple[Step, ...]:
    """The prompts twice, one round after the other; before each cell of a sweep one request that does not count."""
    prompts = [cell for cell in cells if cell.kind == "prompt"]
    steps: list[tuple[Cell, bool, int, int]] = []
    for counts in (False, True):
        steps += [(cell, counts, cell.requests, cell.output_tokens) for cell in prompts]
    for cell in cells:
        if cell.kind == "sweep":
            steps.append((cell, False, 1, min(8, cell.output_tokens)))
            steps.append((cell, True, cell.requests, cell.output_tokens))
    return tuple(Step(*step, seed) for seed, step in enumerate(steps, start=1))

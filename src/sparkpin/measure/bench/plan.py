"""What is measured: five prompts, and a sweep of concurrency and prompt lengths as far as a release's flags allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparkpin.core.errors import InputError
from sparkpin.measure.bench.record import Cell
from sparkpin.pins.reading import read_yaml
from sparkpin.pins.vllm_flags import Flags

PROMPTS = read_yaml(Path(__file__).with_name("prompts.yaml"))
LEAST = 1024  # tokens of context that a release needs for the five: an answer gets what the prompt leaves
# Tokens before the end of the context where an answer has to end: drafts are shortened there, which ends vLLM 0.32's
# engine on a CPU (docs/smoke.md).
SLACK = 16
LENGTHS = (128, 1024, 8192, 32768, 131072)
CONCURRENCIES = (1, 2, 4, 8, 16)
SWEEP_OUTPUT = 128
QUICK_OUTPUT = 32
# At once in a cell of the sweep: 16 prompts of 128K take a Spark the better part of an hour.
MOST_PROMPT_TOKENS = 1 << 18
LONGEST_COMPARED = 1024
VLLM_SEQUENCES = 256  # what vLLM takes at a time, at least, where no flag sets it


@dataclass(frozen=True)
class BenchPlan:
    cells: tuple[Cell, ...]
    context: int  # tokens that the release takes, of prompt and answer together


def make_plan(argv: Sequence[str], config_tokens: int, *, quick: bool = False, ignore_eos: bool = False) -> BenchPlan:
    """Of a release's command. InputError where its context is too short for any cell.

    config_tokens: what the model's own configuration allows, for a command that does not limit it. quick: short answers
    and few cells, to see that it works; ignore_eos: the model must not end its answers itself.
    """
    flags = Flags(argv, "the release's command", {})
    tokens = flags.number("--max-model-len", auto=True)
    context = config_tokens if tokens is None or tokens < 0 else tokens
    sequences = flags.number("--max-num-seqs") or VLLM_SEQUENCES
    most = QUICK_OUTPUT if quick else context
    prompt_of = partial(Cell, kind="prompt", ignore_eos=ignore_eos)
    cells = [
        prompt_of(name=one["name"], prompt=one["text"], response_size=min(one["tokens"], most))
        for one in (PROMPTS if context >= LEAST else ())
    ]
    cells += sweep(context, sequences, quick)
    if not cells:
        raise InputError(
            f"the release takes {context} tokens: too few for any cell of the plan",
            next_step="raise --max-model-len in its recipe, and build it again",
        )
    return BenchPlan(tuple(cells), context)


def sweep(context: int, sequences: int, quick: bool) -> Iterator[Cell]:
    output = QUICK_OUTPUT if quick else SWEEP_OUTPUT
    fitting = [n for n in CONCURRENCIES if n <= sequences]
    for length in LENGTHS[:1] if quick else LENGTHS:
        for concurrency in dict.fromkeys([fitting[0], fitting[-1]]) if quick else fitting:
            if length + output + SLACK > context or (concurrency > 1 and concurrency * length > MOST_PROMPT_TOKENS):
                continue
            yield Cell(
                name=f"{length} x {concurrency}",
                kind="sweep",
                prompt_size=length,
                response_size=output,
                concurrency=concurrency,
                batches=3 if concurrency == 1 and not quick else 2,
                ignore_eos=True,
            )


def common(a: BenchPlan, b: BenchPlan) -> BenchPlan:
    """What both can be asked alike, and of the sweep the longest of the short prompts, of one request at a time and
    of as many as both allow."""
    both = [cell for cell in a.cells if cell in b.cells]
    if not both:  # a scripted model is kept from ending its answers, another is not
        raise InputError("no prompt fits both releases", next_step="compare releases with longer contexts")
    short = [cell for cell in both if cell.kind == "sweep" and cell.prompt_size <= LONGEST_COMPARED]
    longest = [cell for cell in short if cell.prompt_size == short[-1].prompt_size]
    prompts = [cell for cell in both if cell.kind == "prompt"]
    return BenchPlan((*prompts, *dict.fromkeys([*longest[:1], *longest[-1:]])), min(a.context, b.context))

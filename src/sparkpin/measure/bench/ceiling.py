"""The roofline beside what was measured."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.measure.bench.record import BenchRecord, Ceiling
from sparkpin.measure.roofline.reads import DecodeModel, model_of, roofline
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release
from sparkpin.serve.memory import recipe as memory


def with_ceiling(paths: Paths, release: Release, record: BenchRecord, bandwidth: float, say: Say) -> BenchRecord:
    """bandwidth: bytes a second. Without a ceiling, and the reason said, where it cannot be told or no prompt of the
    five was measured."""
    rows = [row for row in record.of_kind("prompt") if row.decode_rate]
    if record.decode_rate is None:
        say("no ceiling: it is one user's, of the five prompts, and none of them was measured")
        return record
    try:
        model = model_made(paths, release)
    except SparkpinError as error:
        say(f"no ceiling: {error.message}")
        return record
    drafted, accepted = (sum(getattr(row, name) or 0 for row in rows) for name in ("drafted", "accepted"))
    context = int(median((row.prompt_tokens + row.output_tokens / 2) / row.completed for row in rows))
    share = accepted / drafted if drafted else 0.0
    made = roofline(model, context=context, bandwidth=bandwidth, accepted=share)
    return replace(
        record,
        ceiling=Ceiling(
            bandwidth=bandwidth,
            context=context,
            accepted=share,
            rate=made.ceiling,
            fraction=made.fraction(record.decode_rate),
        ),
    )


def model_made(paths: Paths, release: Release) -> DecodeModel:
    """Of the release as it was made, whatever the pins say by now."""
    with project_of(paths, release) as project:
        recipe = manifests.load_recipe(project, release.recipe)
        stack = manifests.load_stack(project, release.stack)
        chain = manifests.load_chain(project, release.stage)
        known = memory.known_of(replace(paths, project=project), recipe, stack, chain)
    return model_of(known.tensors, known.geometry, known.settings, known.loading, symmetric=known.symmetric)

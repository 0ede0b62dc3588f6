"""Kernels of our mods that were compiled when the image was built: all of them there, and for this GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from sparkpin.smoke.inspect.finding import ImageFinding
from sparkpin.smoke.inspect.gpu import FOLDER, runs
from sparkpin.smoke.inspect.scan import ImageFacts

AGAIN = "build the image again: invoke build"


@dataclass(frozen=True)
class Ahead:
    """A mod that can compile its kernels ahead."""

    mod: str
    package: str
    archs: tuple[tuple[str, int], ...]  # of its .cubin files
    runs: int
    listed: int  # kernels that its list names
    triton: str

    @property
    def held(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.archs)


def ahead(facts: ImageFacts, sm: int) -> list[Ahead]:
    """One row for each mod with the entry point, whether its kernels are there or not."""
    rows = []
    for package in facts.packages:
        for mod in package.kernels:
            folder = f"{FOLDER}/{mod}"
            codes = facts.cubins.get(folder, ())
            listed, triton = manifest(facts.manifests.get(folder, ""))
            rows.append(
                Ahead(
                    mod,
                    package.name,
                    tuple((code.name, count) for code, count in codes),
                    sum(count for code, count in codes if runs(code, sm)),
                    listed,
                    triton,
                )
            )
    return rows


def manifest(text: str) -> tuple[int, str]:
    """(how many kernels, version of Triton) of a list that mods/modkit wrote; (0, "") where there is none."""
    try:
        value = json.loads(text)
        return len(value["kernels"]), str(value["triton"])
    except (ValueError, KeyError, TypeError):
        return 0, ""


def kernel_findings(facts: ImageFacts, sm: int) -> Iterator[ImageFinding]:
    installed = facts.package("triton")
    for row in ahead(facts, sm):
        total = sum(count for _, count in row.archs)
        if not row.listed or row.runs < row.listed or total != row.listed:
            seen = f"{row.runs} of its {row.listed or 'unlisted'} kernels are in the image for sm_{sm}"
            text = f"{seen} ({row.held or 'none at all'}): the others are compiled on the machine, at each first start"
            whole = total == row.listed > 0 == row.runs
            step = f"take a stack whose gpu.sm is {sm // 10}.{sm % 10}, and build" if whole else AGAIN
            yield ImageFinding("error", "kernels", row.mod, text, step, what=row.held)
        elif installed is None or installed.version != row.triton:
            version = installed.version if installed else "none"
            text = f"its kernels are by Triton {row.triton}, the image has {version}, which would not find them"
            yield ImageFinding("error", "kernels", row.mod, text, AGAIN, what=row.triton)
        else:
            yield ImageFinding("note", "kernels", row.mod, f"compiled ahead: {row.held}")

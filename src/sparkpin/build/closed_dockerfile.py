"""What a Dockerfile may reach: its own stages, the image that it stands on, its context. Nothing else, and no network.

`--network none` holds for RUN only: the engine itself would fetch a URL of ADD, a `# syntax=` frontend, or an image
that a FROM or a --from names and it does not have.
"""

from __future__ import annotations

import re

from sparkpin.core.errors import BuildError

DIRECTIVE = re.compile(r"#\s*(syntax|escape|check)\s*=", re.I)
FROM = re.compile(r"(?:--platform=\S+\s+)?(?P<image>\S+)(?:\s+as\s+(?P<name>\S+))?\s*$", re.I)
SOURCE = re.compile(r"(?:--|,)from=(?P<image>[^\s,]+)", re.I)


BUILDER = "BUILDER"  # the argument that names where the steps run: what the image stands on, or a native stand-in


def require_closed(text: str, parent_ref: str) -> None:
    """BuildError, with the line, for a Dockerfile that could let the engine open a connection."""
    known = {"scratch", parent_ref}
    if f"ARG {BUILDER}={parent_ref}" in (line for _, line in instructions(text)):
        known.add(f"${BUILDER}")
    for number, line in instructions(text):
        if DIRECTIVE.match(line):
            raise refused(number, line, "no parser directive: a frontend would be fetched")
        word, _, rest = line.partition(" ")
        word = word.upper()
        if word == "ADD":
            raise refused(number, line, "COPY: the engine fetches what ADD names")
        if word == "FROM":
            match = FROM.match(rest.strip())
            if match is None or match["image"] not in known:
                raise refused(number, line, f"FROM {parent_ref}, scratch or a stage above")
            known |= {match["name"]} if match["name"] else set()
        elif word in ("COPY", "RUN") and (far := [image for image in SOURCE.findall(rest) if image not in known]):
            raise refused(number, line, f"a stage above, not {far[0]}")


def instructions(text: str) -> list[tuple[int, str]]:
    """(line number, instruction) with continued lines joined. Directives are the comments before the first of them."""
    found: list[tuple[int, str]] = []
    open_line = ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or (line.startswith("#") and (found or not DIRECTIVE.match(line))):
            continue
        start, open_line = (number, line) if not open_line else (found.pop()[0], f"{open_line} {line}")
        found.append((start, open_line.removesuffix("\\").strip()))
        open_line = found[-1][1] if line.endswith("\\") else ""
    return found


def refused(number: int, line: str, wanted: str) -> BuildError:
    return BuildError(
        f"line {number} of the rendered Dockerfile: saw {line[:100]!r}, wanted {wanted}",
        next_step="mend the template in dockerfiles/; `invoke build --render` prints what comes of it",
    )

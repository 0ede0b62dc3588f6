"""Tables of the documents, for tests that hold them to what was measured."""

from __future__ import annotations

from places import PROJECT


def table(document: str, titles: str) -> list[list[str]]:
    """The rows' cells of the table whose head begins with these titles."""
    page = (PROJECT / document).read_text(encoding="utf-8")
    lines = page.partition(f"| {titles} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

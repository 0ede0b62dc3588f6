"""Find words of .ci/prose.yaml in README.md, CONTRIBUTING.md, docs/ and the strings of src/sparkpin that people read.

Prints `file:line: found (why): better`, and exits with 1 where it found one. Code, links' targets and the generated
parts of pages are not read: what these show is read where it is written.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

PROJECT = Path(__file__).resolve().parents[1]
CODE = re.compile(
    r"<!-- generated.*?<!-- end -->|^```.*?^```|^ {4,}(?![-*\d]).*?$|`(?:[^`\n]|\n(?!\n))+`|\]\([^)\s]*\)",
    re.DOTALL | re.MULTILINE,
)
NO_PROSE = re.compile(r"^[^ ]*$")  # a key, a path, a flag
DATA = (
    "pins/families.yaml", "pins/known_issues.yaml", "src/sparkpin/releases/crash_causes.yaml",
    "src/sparkpin/serve/clients.yaml", "src/sparkpin/serve/rules.yaml", "src/sparkpin/smoke/inspect/rules.yaml",
)  # fmt: skip
NOT_OURS = {"evidence", "samples", "spellings", "unverified"}  # what others wrote, and notes on them


@cache
def rules() -> list[dict[str, str]]:
    found: list[dict[str, str]] = yaml.safe_load((PROJECT / ".ci/prose.yaml").read_text(encoding="utf-8"))
    return found


def faults(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """Line and message of each match. first: the number of the text's first line."""
    for rule in rules():
        for match in re.finditer(rule["pattern"], text, re.IGNORECASE):
            shown = " ".join(match[0].split())
            yield first + text.count("\n", 0, match.start()), f"{shown!r} ({rule['why']}): {rule['better']}"


def prose(page: str) -> str:
    """A page of Markdown without its code, as many lines long."""
    return CODE.sub(lambda code: "`code`" * bool(re.match("`[^`]", code[0])) + "\n" * code[0].count("\n"), page)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Texts of a module; of the docstrings those of tasks, which are their help. An f-string is one text."""
    tree = ast.parse(source)
    skipped = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("task(" in ast.unparse(one) for one in node.decorator_list):
            yield node.lineno, ast.get_docstring(node) or ""
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def values(data: object) -> Iterator[str]:
    """The strings of what a YAML file has."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for one in data if isinstance(data, list) else [data[key] for key in data if key not in NOT_OURS]:
            yield from values(one)


def main() -> int:
    found = []
    for page in [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted(PROJECT.glob("docs/**/*.md"))]:
        found += [(page, *fault) for fault in faults(prose(page.read_text(encoding="utf-8")))]
    for module in sorted(PROJECT.glob("src/sparkpin/**/*.py")):
        for line, text in strings(module.read_text(encoding="utf-8")):
            if not NO_PROSE.match(text):
                found += [(module, *fault) for fault in faults(text, line)]
    for file in map(PROJECT.joinpath, DATA):
        texts = values(yaml.safe_load(file.read_text(encoding="utf-8")))
        found += [(file, 0, fault) for text in texts for _, fault in faults(text)]
    for file, line, fault in found:
        print(f"{file.relative_to(PROJECT)}:{line}: {fault}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

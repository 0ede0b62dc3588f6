"""Names that say nothing, of the house's list, are not used in src/sparkpin."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from places import PROJECT

EMPTY = {"told", "said", "seen", "held", "kept", "made", "taken", "own", "whole", "alone", "keep"}
ALLOWED = {  # words of the command line, and keys of records
    ("cli/history.py", "keep"), ("cli/releases.py", "keep"), ("prune/plan.py", "keep"),
    ("releases/quality_record.py", "seen"), ("releases/quality_record.py", "kept"),
}  # fmt: skip


def names(tree: ast.AST) -> Iterator[str]:
    """What is given a name: variables, parameters, fields, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def test_no_name_is_empty() -> None:
    files = {
        path.relative_to(PROJECT / "src/sparkpin").as_posix(): path for path in PROJECT.glob("src/sparkpin/**/*.py")
    }
    found = {(file, name) for file, path in files.items() for name in EMPTY & {*names(ast.parse(path.read_text()))}}
    assert found == ALLOWED
    planted = ast.parse("def keep(told, *, own): self.seen = (kept := 1)\nclass held: made: int\nimport a as alone")
    assert {*names(planted)} == {"keep", "told", "own", "seen", "kept", "held", "made", "alone"}

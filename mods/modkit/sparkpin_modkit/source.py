"""What Python source says of a name: its parameters, and a hash of its text. Neither vLLM nor torch is imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

READ = Path(__file__).with_name("vllm_source.json")
"""Release -> name that some mod touches -> what `Source.find` said there, None for what that release lacks."""


@dataclass(frozen=True)
class Found:
    """parameters: as `check_signature` writes them, None for what is not called. sha256: of the source, for a class of
    its head and ``__init__``."""

    parameters: str | None
    sha256: str


@dataclass(frozen=True)
class Node:
    """A statement of a module that gives a name its meaning."""

    module: str
    statement: ast.stmt
    in_class: bool = False


class Source:
    """The .py files of one vLLM. folder: holds the package ``vllm``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parse = functools.cache(self._parse)

    def find(self, name: str) -> Found | None:
        """What ``"module:Class.name"`` names, found through imports and base classes; None when it is not there."""
        module, _, qualified = name.partition(":")
        first, *rest = qualified.split(".")
        node = self._top(module, first)
        for part in rest:
            node = self._member(node, part) if node else None
        return self._describe(node) if node else None

    def _parse(self, module: str) -> tuple[Path, list[str], ast.Module] | None:
        base = self.folder.joinpath(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                return path, text.splitlines(keepends=True), ast.parse(text)
        return None

    def _top(self, module: str, name: str) -> Node | None:
        parsed = self.parse(module)
        if parsed is None:
            return None
        path, _, tree = parsed
        found: Node | None = None
        for statement in _flat(tree.body):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        target = _absolute(module, path, statement)
                        # A generated file (_version.py) may be missing: then the import itself is what there is.
                        found = self._top(target, alias.name) or Node(module, statement)
            elif name in _names(statement) or (
                isinstance(statement, ast.FunctionDef)
                and statement.name == "__getattr__"
                and any(isinstance(part, ast.Constant) and part.value == name for part in ast.walk(statement))
            ):
                found = Node(module, statement)
        return found

    def _member(self, node: Node, name: str) -> Node | None:
        if not isinstance(node.statement, ast.ClassDef):
            return None
        own = [statement for statement in _flat(node.statement.body) if name in _names(statement)]
        if own:
            return Node(node.module, own[-1], in_class=True)
        for base in node.statement.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            parent = self._top(node.module, base.id) if isinstance(base, ast.Name) else None
            inherited = self._member(parent, name) if parent else None
            if inherited:
                return inherited
        return None

    def _describe(self, node: Node) -> Found:
        statement = node.statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            return Found(_parameters(statement, node.in_class), _sha256(self._text(node)))
        if not isinstance(statement, ast.ClassDef):
            return Found(None, _sha256(self._text(node)))
        head = f"class {statement.name}({', '.join(ast.unparse(base) for base in statement.bases)})\n"
        init = self._member(node, "__init__")
        if init is not None and isinstance(init.statement, ast.FunctionDef):
            parameters = _parameters(init.statement, in_class=True).partition(",")[2].strip()
            return Found(parameters, _sha256(head + self._text(init)))
        if any("dataclass" in ast.unparse(decorator) for decorator in statement.decorator_list):
            fields = [part.target.id for part in statement.body if _is_field(part)]
            return Found(", ".join(fields), _sha256(head + self._text(node)))
        return Found(None, _sha256(head))

    def _text(self, node: Node) -> str:
        parsed = self.parse(node.module)
        assert parsed is not None
        first = min([node.statement.lineno, *(d.lineno for d in getattr(node.statement, "decorator_list", []))])
        return textwrap.dedent("".join(parsed[1][first - 1 : node.statement.end_lineno]))


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those below if, try and with; not those under TYPE_CHECKING and in handlers of exceptions."""
    for statement in body:
        if isinstance(statement, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                yield from _flat(statement.body)
            yield from _flat(statement.orelse)
        elif isinstance(statement, ast.Try | ast.With):
            yield from _flat(statement.body)
        else:
            yield statement


def _names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _is_field(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation)


def _absolute(module: str, path: Path, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    kept = len(parts) - statement.level + (path.name == "__init__.py")
    return ".".join([*parts[:kept], *filter(None, [statement.module])])


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> str | None:
    """As seen through the class: a class method is bound, a property is not called (None)."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    if decorators & {"property", "cached_property"}:
        return None
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if in_class and "classmethod" in decorators:
        del names[0]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(names)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()

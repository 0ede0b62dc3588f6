"""What a release of vLLM takes on its command line, read from its wheel's sources; nothing of it is imported.

    python benchmarks/wheelflags.py WHEEL...

writes `src/sparkpin/recipes/vllm/<version>.json` for each wheel: flags, their kinds and values, parsers, backends. A
wheel is what `pip download --no-deps vllm==VERSION` brings, or the one of the store that a stack's lock names.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpin.core import files
from sparkpin.core.errors import ManifestError
from sparkpin.recipes.release import DATA

WANTED = re.compile(r"vllm/.*\.py")
REGISTERED = {"_TOOL_PARSERS_TO_REGISTER": "tool_parsers", "_REASONING_PARSERS_TO_REGISTER": "reasoning_parsers"}
PARSING = ("engine/arg_utils.py", "/cli_args.py")  # ends of files that say what the command line takes
LITERAL = re.compile(r"^\w+(: \w+)? = (Literal\[|Literal$)", re.MULTILINE)


@dataclass
class Sources:
    literals: dict[str, ast.expr] = field(default_factory=dict)  # alias -> its expression
    fields: dict[str, dict[str, ast.expr]] = field(default_factory=dict)  # class -> field -> its annotation
    bases: dict[str, list[str]] = field(default_factory=dict)  # class -> its bases
    registered: dict[str, list[str]] = field(default_factory=dict)
    backends: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    calls: list[tuple[ast.Call, Mapping[str, str]]] = field(default_factory=list)

    def read(self, name: str, text: str) -> None:
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.assign(node.targets[0].id, node.value)
            elif isinstance(node, ast.ClassDef):
                self.define(node)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and name == "vllm/envs.py":
                self.variables = sorted(str(constant(key)) for key in node.value.keys)
        if name.endswith(PARSING):
            groups = kwargs_of(tree)
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            self.calls += [(call, groups) for call in calls if getattr(call.func, "attr", "") == "add_argument"]

    def assign(self, name: str, value: ast.expr) -> None:
        if name in REGISTERED and isinstance(value, ast.Dict):
            self.registered[REGISTERED[name]] = sorted(str(constant(key)) for key in value.keys)
        elif "Literal" in ast.dump(value):
            self.literals[name] = value

    def define(self, node: ast.ClassDef) -> None:
        if node.name == "AttentionBackendEnum":
            values = [part.targets[0] for part in node.body if isinstance(part, ast.Assign)]
            self.backends = sorted(value.id for value in values if isinstance(value, ast.Name))
        noted = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        found = {part.target.id: part.annotation for part in noted if isinstance(part.target, ast.Name)}
        if found:
            self.fields[node.name] = found
            self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

    def annotation(self, kind: str, name: str) -> ast.expr | None:
        for one in (kind, *self.bases.get(kind, ())):
            if name in self.fields.get(one, {}):
                return self.fields[one][name]
        return None

    def values(self, annotation: ast.expr | None, depth: int = 0) -> set[str]:
        """Text that an annotation's literals allow."""
        if annotation is None or depth > 5:
            return set()
        found: set[str] = set()
        for node in ast.walk(annotation):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
                constants = [part.value for part in ast.walk(node.slice) if isinstance(part, ast.Constant)]
                found |= {str(value) for value in constants if value is not None}
            elif isinstance(node, ast.Name) and node.id in self.literals:
                found |= self.values(self.literals[node.id], depth + 1)
            elif isinstance(node, ast.Name) and node.id == "AttentionBackendEnum":
                found |= set(self.backends)
        return found

    def flag(self, annotation: ast.expr | None) -> dict[str, Any]:
        """kind: `switch` has a `--no-` form, `maybe` takes a value or none, `value` takes one or more.
        open: it takes others than `values`, too, which plugins may bring."""
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} if annotation else set()
        if "bool" in names:
            return {"kind": "maybe" if "str" in names else "switch"}
        values = sorted(self.values(annotation))
        more = {"open": True} if "str" in names else {}
        return {"kind": "value", **({"values": values, **more} if values else {})}


def constant(node: ast.AST | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def kwargs_of(tree: ast.AST) -> dict[str, str]:
    """Variable -> class, of `model_kwargs = get_kwargs(ModelConfig)`; class.field, of `x = model_kwargs["field"]`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name, value = node.targets[0].id, node.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "get_kwargs":
            found[name] = value.args[0].id if isinstance(value.args[0], ast.Name) else ""
        elif (entry := entry_of(value, found)) is not None:
            found[name] = ".".join(entry)
    return found


def entry_of(node: ast.expr, groups: Mapping[str, str]) -> tuple[str, str] | None:
    """Class and field of `kwargs["field"]`, of `{**kwargs["field"], ...}`, and of a variable that was made of one."""
    if isinstance(node, ast.Dict):
        return next(filter(None, (entry_of(value, groups) for value in node.values)), None)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in groups:
        return groups[node.value.id], str(constant(node.slice))
    if isinstance(node, ast.Name) and "." in groups.get(node.id, ""):
        kind, _, name = groups[node.id].partition(".")
        return kind, name
    return None


def flags_of(sources: Sources) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in [name for name in sources.fields if name.endswith("FrontendArgs")]:
        for key, annotation in sources.fields[name].items():
            found["--" + key.replace("_", "-")] = sources.flag(annotation)
    for call, groups in sources.calls:
        names = [str(constant(argument)) for argument in call.args if str(constant(argument)).startswith("-")]
        long = next((name for name in names if name.startswith("--")), None)
        if long is None:
            continue
        entry: dict[str, Any] = {"kind": "value"}
        for keyword in call.keywords:
            if keyword.arg is None and (part := entry_of(keyword.value, groups)) is not None:
                entry = sources.flag(sources.annotation(*part))
            elif keyword.arg == "action" and constant(keyword.value) in ("store_true", "store_false"):
                entry = {"kind": "bare"}
            elif keyword.arg == "action" and "BooleanOptionalAction" in ast.dump(keyword.value):
                entry = {"kind": "switch"}
        others = [name for name in names if name != long]
        found[long] = entry | ({"also": others} if others else {})
    return dict(sorted(found.items()))


def read_wheel(path: Path) -> dict[str, Any]:
    """The content of a version's file. ManifestError for a wheel that is not vLLM's, or of a vLLM built otherwise."""
    sources = Sources()
    with zipfile.ZipFile(path) as wheel:
        metadata = next((name for name in wheel.namelist() if re.fullmatch(r"vllm[^/]*\.dist-info/METADATA", name)), "")
        version = re.search(r"^Version: (\S+)", wheel.read(metadata).decode(), re.MULTILINE) if metadata else None
        for name in sorted(wheel.namelist()):
            if WANTED.fullmatch(name):
                text = wheel.read(name).decode()
                if needed(name, text):
                    sources.read(name, text)
    flags = flags_of(sources)
    if version is None or len(flags) < 100 or set(sources.registered) != set(REGISTERED.values()):
        seen = f"{len(flags)} flags, {', '.join(sources.registered) or 'no parsers'}"
        raise ManifestError(path, "vllm/", seen, "the sources of vLLM: its flags and the lists of its parsers")
    sha256, size = files.sha256_file(path)
    return {
        "version": version[1].partition("+")[0],
        "source": {"wheel": path.name if path.suffix == ".whl" else "", "size": size, "sha256": sha256},
        "tool_parsers": sources.registered["tool_parsers"],
        "reasoning_parsers": sources.registered["reasoning_parsers"],
        "environment": sources.variables,
        "speculative_methods": sorted(sources.values(sources.annotation("SpeculativeConfig", "method"))),
        "speculative_keys": sorted(sources.fields.get("SpeculativeConfig", ())),
        "flags": flags,
    }


def needed(name: str, text: str) -> bool:
    """Whether a file can hold one of those; parsing all of vLLM takes a minute."""
    return (
        name.startswith("vllm/config/")
        or name == "vllm/envs.py"
        or name.endswith(PARSING)
        or any(word in text for word in (*REGISTERED, "class AttentionBackendEnum"))
        or LITERAL.search(text) is not None
    )


def text_of(value: dict[str, Any]) -> str:
    """JSON with one flag a line, so that a new release's changes can be read."""
    flags = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value["flags"].items())
    rest = ",\n".join(f"  {json.dumps(key)}: {json.dumps(part)}" for key, part in value.items() if key != "flags")
    return f'{{\n{rest},\n  "flags": {{\n{flags}\n  }}\n}}\n'


def main(wheels: list[str]) -> None:
    for wheel in wheels:
        value = read_wheel(Path(wheel))
        path = DATA / f"{value['version']}.json"
        with files.atomic_file(path) as file:
            file.write(text_of(value).encode())
        print(f"{path}: {len(value['flags'])} flags, {len(value['tool_parsers'])} tool parsers")


if __name__ == "__main__":
    main(sys.argv[1:])

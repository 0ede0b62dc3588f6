"""docs/architecture.md says which module may do what; the imports have to agree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import PROJECT

SOURCES = PROJECT / "src/sparkpin"


def imports(path: Path) -> set[str]:
    """Names of all that a module imports, wherever in it; `from sparkpin import a` counts as sparkpin.a."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def importers(package: str) -> set[str]:
    """Modules of sparkpin that import a package or anything in it."""
    return {
        path.relative_to(SOURCES).with_suffix("").as_posix()
        for path in SOURCES.rglob("*.py")
        if any(name == package or name.startswith(f"{package}.") for name in imports(path))
    }


@pytest.mark.parametrize(
    ("package", "modules"),
    [
        ("yaml", {"manifests", "community/yamlfile"}),
        ("huggingface_hub", {"hubclient", "hublock"}),
        ("httpx", {"wheels", "smoke/client"}),
        ("socket", {"endpoint", "ports"}),
        (
            "docker",
            {
                "engine",
                "endpoint",
                "container",
                "imagefiles",
                "bench/load",
                "bench/target",
                "remote",
                "serve",
                "smoke/server",
                "loading/run",
                "serving/death",
                "serving/launch",
                "serving/served",
                "serving/switching",
                "serving/tasks",
                "serving/waiting",
            },
        ),
        (
            "subprocess",
            {
                "bisect/check",
                "buildkit",
                "daemon",
                "debs",
                "gittree",
                "host",
                "indexed",
                "lint",
                "modwheels",
                "remote",
                "rootfs",
                "evidence/signing",
                "quality/standard",
                "quality/watched",
                "serving/inside",
                "wheels",
            },
        ),
        ("cyclonedx", {"evidence/sbom"}),
        ("in_toto_attestation", {"evidence/provenance"}),
        ("sparkpin.core.prune_lock", {"commands", "importing", "jobs", "prune"}),
        ("sparkpin.fetch.stack", {"commands", "jobs", "reproduce"}),
        ("socketserver", {"remote"}),
        ("sparkpin.fetch.lock_stack", {"commands", "fetch"}),
        ("sparkpin.fetch.git", {"modlock", "sourcelock"}),
        ("sparkpin.fetch.wheels", {"fetch", "indexed", "lock", "sourcelock", "history/why"}),
        (
            "sparkpin.fetch.model",
            {"checkpoint/build", "commands", "hublock", "importing", "memory/tasks", "report/memory"},
        ),
        ("sparkpin.fetch.hub_client", {"hub", "hublock", "hubsite"}),
    ],
)
def test_only_these_modules_import(package: str, modules: set[str]) -> None:
    assert importers(package) == modules


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("history.tasks", {"docker", "requests"}),
        ("pairing", {"docker", "requests"}),
        ("lock", {"docker", "requests"}),
        ("commands", set()),
    ],
)
def test_what_takes_long_to_load_is_loaded_where_it_is_needed(module: str, unneeded: set[str]) -> None:
    slow = {"httpx", "cyclonedx", "in_toto_attestation", "huggingface_hub"} | unneeded
    text = f"import sys, sparkpin.{module}; print(*sorted(name for name in {slow} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_every_module_stands_in_the_table() -> None:
    text = (PROJECT / "docs/architecture.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w/.]+)`", row)}
    modules = {path.stem for path in SOURCES.glob("*.py")} - {"__init__"}
    folders = {f"{path.parent.name}/" for path in SOURCES.glob("*/__init__.py")}
    assert {name.partition(".")[0] for name in named} == modules | folders

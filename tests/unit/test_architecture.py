"""docs/architecture.md draws the rooms of src/sparkpin, one above the other; the imports have to agree."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest
from places import PROJECT

SOURCES = PROJECT / "src/sparkpin"
MAP = PROJECT / "docs/architecture.md"
NETWORK = ("huggingface_hub", "httpx", "requests", "urllib3", "urllib.request", "http.client", "ftplib", "smtplib")
NEARBY = {
    "host/daemon.py",  # Docker's API, where DOCKER_HOST says
    "host/engine.py",  # the same; it names what the SDK lets through
    "smoke/client.py",  # the server that is asked, at a Unix socket or 127.0.0.1
    "releases/inside.py",  # is copied into a container and runs there: the server in it
}
ONLY = {  # library -> rooms and files that may import it
    "docker": {"host"},
    "yaml": {"pins/reading.py", "recipes/recipe.py"},
    **{library: {"fetch", *NEARBY} for library in NETWORK},
}


def floors() -> list[dict[str, str]]:
    """Room -> what may be in it, for each row of the picture, from the highest."""
    picture = re.findall(r"^```text\n(.*?)^```", MAP.read_text(), re.M | re.S)[0]
    rows = [row.splitlines() for row in re.split(r"\n{2,}", picture.strip())]
    return [dict(line.split(maxsplit=1) for line in row) for row in rows]


@functools.cache
def imports() -> frozenset[tuple[str, str]]:
    return frozenset(found_imports())


def found_imports() -> Iterator[tuple[str, str]]:
    """Each file with each name that it imports, wherever in it; `from a import b` counts as a and as a.b."""
    for path in sorted(SOURCES.rglob("*.py")):
        file = path.relative_to(SOURCES).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: a relative import"
                yield from ((file, name) for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names)))


def room_of(path: str) -> str:
    return re.split(r"[/.]", path, maxsplit=1)[0]


def test_every_room_is_in_the_picture_and_says_in_a_line_what_it_is() -> None:
    rooms = {path.name for path in SOURCES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {room for floor in floors() for room in floor}
    assert [path.name for path in SOURCES.iterdir() if path.is_file()] == ["__init__.py"]
    assert not {file.parent for file in SOURCES.rglob("*.py")} - {file.parent for file in SOURCES.rglob("__init__.py")}
    for room in rooms:
        first = (ast.get_docstring(ast.parse((SOURCES / room / "__init__.py").read_text())) or "").partition("\n")[0]
        assert first.endswith("."), f"{room}: its first line is no sentence: {first!r}"


def test_imports_go_down() -> None:
    height = {room: -floor for floor, rooms in enumerate(floors()) for room in rooms}
    pairs = {(file, name) for file, name in imports() if name.startswith("sparkpin.") and "/" in file}
    rooms = [(file, name, room_of(file), room_of(name.removeprefix("sparkpin."))) for file, name in pairs]
    assert len(rooms) > 1000, "they are found"
    assert not [f"{file}: {name}" for file, name, own, other in rooms if own != other and height[other] >= height[own]]


@pytest.mark.parametrize("library", ONLY)
def test_only_these_import(library: str) -> None:
    users = {file for file, name in imports() if name == library or name.startswith(f"{library}.")}
    assert not [file for file in users if not {file, room_of(file)} & ONLY[library]]

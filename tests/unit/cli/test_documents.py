"""The README and docs/: the tasks take every command that stands there, every link leads somewhere, and what is made
from the code is what .ci/pages.py makes."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from checkout import PROJECT

from sparkpin.cli.line import TaskParser, find_task
from sparkpin.recipes import check

PAGES = [*sorted(PROJECT.glob("*.md")), *sorted(PROJECT.glob("docs/**/*.md"))]
NOTES = sorted(PROJECT.glob("benchmarks/**/*.md"))
COMMAND = re.compile(r"^ {4,}(?:\.venv/bin/)?invoke (?P<words>.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:)(?P<path>[^)#]*)(?:#(?P<part>[^)]*))?\)")


def commands(page: Path) -> list[list[str]]:
    """The words of each `invoke` of the page's code; a line with [ ] is a usage, no command."""
    found = []
    for match in COMMAND.finditer(page.read_text(encoding="utf-8")):
        text = match["words"].split("    #")[0].split(" # ")[0]
        if not re.search(r"[\[\]|]|\.\.\.", text):
            found += [shlex.split(re.split("[>&]", one)[0].strip().removeprefix("invoke ")) for one in text.split(";")]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_taken(page: Path) -> None:
    for line in commands(page):
        name, words = find_task(line)
        TaskParser("invoke", name).read(words)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        to = page.parent / match["path"] if match["path"] else page
        assert to.exists(), match[0]
        assert not match["part"] or match["part"] in anchors(to), match[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|benchmarks|mods|dockerfiles)/[\w./-]+\.\w+)", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (PROJECT / name).exists()]


def test_every_document_is_in_the_list() -> None:
    listed = {match["path"] for match in LINK.finditer((PROJECT / "docs/README.md").read_text(encoding="utf-8"))}
    assert listed >= {page.name for page in PROJECT.glob("docs/*.md")} - {"README.md"}
    site = (PROJECT / ".ci/mkdocs.yml").read_text(encoding="utf-8")
    assert not [page for page in PROJECT.glob("docs/**/*.md") if f": {page.relative_to(PROJECT)}\n" not in site]


def test_generated_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("pages", PROJECT / ".ci/pages.py")
    assert spec and spec.loader
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    stale = [page.name for page, text in texts.items() if pages.filled(text) != text]
    assert not stale, "run .venv/bin/python .ci/pages.py"
    assert len([text for text in texts.values() if pages.PART.search(text)]) >= 5


@pytest.mark.parametrize("recipe", sorted(PROJECT.glob("docs/examples/*.yaml")), ids=lambda path: path.stem)
def test_the_annotated_recipes_pass(recipe: Path) -> None:
    assert check.check(PROJECT, str(recipe), None).errors == []


def test_the_site_needs_no_other_version_of_what_is_installed() -> None:
    locked = [
        dict(re.findall(r"^([\w.-]+)==(\S+) (?:;.*)?\\$", (PROJECT / name).read_text(encoding="utf-8"), re.MULTILINE))
        for name in ("requirements.lock", ".ci/docs.lock")
    ]
    shared = locked[0].keys() & locked[1].keys()
    assert shared and {name: locked[0][name] for name in shared} == {name: locked[1][name] for name in shared}

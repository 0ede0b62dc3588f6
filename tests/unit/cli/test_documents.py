"""The README and docs/: the tasks take every command that stands there, and every link leads somewhere."""

import re
import shlex
from pathlib import Path

import pytest
from checkout import PROJECT

from sparkpin.cli.line import TaskParser, find_task

README = PROJECT / "README.md"
PAGES = [README, *sorted(PROJECT.glob("docs/*.md")), PROJECT / "CONTRIBUTING.md", PROJECT / "SECURITY.md"]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


def long_sentences(text: str) -> list[str]:
    """Those of more than 30 words; code and tables are none."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    prose = "\n".join(
        one for one in text.splitlines() if not one.lstrip().startswith("|") and not one.startswith("    ")
    )
    parts = re.split(r"(?<=[.!?:;])\s+|\n\n|\n\s*(?:-|\d+\.) ", prose)
    return [part for part in parts if len([word for word in part.split() if re.search(r"\w", word)]) > 30]


def test_sentences_are_short() -> None:
    pages = [*PAGES, *PROJECT.glob("mods/**/README.md"), *PROJECT.glob("benchmarks/**/README.md")]
    assert [sentence for page in pages for sentence in long_sentences(page.read_text(encoding="utf-8"))] == []
    assert len(long_sentences(f"Short. {'word ' * 31}end. | Short")) == 1


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 110

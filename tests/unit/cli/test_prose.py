"""The prose rules of .ci/prose.yaml: each finds what is planted, wherever people would read it."""

import importlib.util
from types import ModuleType

import pytest
from checkout import PROJECT

STYLE = (  # of the house's table: what no text has
    "the page says that", "invoke tells you", "this cannot be told", "is held against the plan", "a check turns",
    "the server wants a key", "what is served of its recipe", "what a change reaches", "read anew", "mend it",
    "all but for one", "the flag; else the rest", "a file beside it", "none at hand", "flags as they come",
    "saw 3, wanted 4", "what it lost", "slower in company", "an enemy", "and that, too.",
)  # fmt: skip


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", PROJECT / ".ci/prose.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROSE = load()


@pytest.mark.parametrize("text", [*STYLE, *(rule["plant"] for rule in PROSE.rules())])
def test_a_planted_fault_is_found(text: str) -> None:
    page = f"# A page\n\n`code` A sentence. {text[:1].upper()}{text[1:]}\n"
    assert {line for line, _ in PROSE.faults(PROSE.prose(page))} == {3}
    source = f'X = 1\nraise ValueError(f"{{X}} {text}")\n'
    assert [line for at, one in PROSE.strings(source) for line, _ in PROSE.faults(one, at)][:1] == [2]
    assert any(list(PROSE.faults(one)) for one in PROSE.values([{"do": text}])), "of data"
    task = f'@task("serve")\ndef serve():\n    """{text}"""\n'
    assert any(list(PROSE.faults(one)) for _, one in PROSE.strings(task)), "the help of a task"


def test_code_and_comments_are_not_read() -> None:
    page = "Text.\n\n    the server wants a key\n\n```text\nanew\n```\n\n[x](at-hand.md) `anew` `it is\nanew`\n"
    assert list(PROSE.faults(PROSE.prose(page))) == []
    assert list(PROSE.strings('"""The module wants it."""\n# anew\n')) == []


def test_sentences_items_and_cells_are_counted_by_themselves() -> None:
    short = " ".join(["word"] * 20)
    page = f"{short}.\n**{short}.** {short}\n\n- {short}\n- {short}\n  1. {short}\n\n| {short} | {short} |\n# {short}"
    assert list(PROSE.faults(page)) == []
    assert [line for line, _ in PROSE.faults(page.replace(f".\n**{short}.**", f"\n**{short}**"))] == [1]

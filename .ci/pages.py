"""Fill the generated parts of docs/*.md from the code and its data: `.venv/bin/python .ci/pages.py`.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. tests/unit/cli/test_documents.py fails where one is
not what this writes.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from sparkpin.cli import line
from sparkpin.cli.tasks import heads
from sparkpin.core.errors import SparkpinError
from sparkpin.pins import manifests, schema
from sparkpin.releases.postmortem import causes

PROJECT = Path(__file__).resolve().parents[1]
PART = re.compile(r"(<!-- generated: (?P<name>\w+) -->\n\n).*?(?=<!-- end -->)", re.DOTALL)
SCHEMAS = (schema.Recipe, schema.Stage, schema.Stack, schema.ModelPin)
MISTAKES = """\
biuld
build --stag v2
build --stage v9
build --stage
build v2
build --recipe qwen3.5-122b
serve
serve v9
serve --tls-cert cert.pem
promote v9
rollback
rollback --to v9
lock --model my
quality v9
verify v9
bench --rounds 2
export v9 bundle.tar
recipe export scripted-tiny --dry-run
plan --memory 128
test --fast --all"""


def table(titles: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [titles.split(" | "), ["---"] * (titles.count(" | ") + 1), *rows]
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in one) + "|\n" for one in lines)


def code(text: str) -> str:
    return f"`{text}`"


def cell(text: str) -> str:
    """Prose from the data, in one line: shell lines and variables in it look like code where a page would show HTML."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def commands() -> Iterator[str]:
    group = ""
    for head in heads().values():
        if head.group != group:
            yield f"## {head.group.capitalize()}\n\n"
        group, parser = head.group, line.TaskParser("invoke", head.name)
        yield f"### {head.name}\n\n{cell(head.summary)}\n\n    {parser.usage}\n"
        examples = (parser.epilog or "").splitlines()[1:]
        yield "".join(f"    {one.strip()}\n" for one in examples) + "\n"
        rows = []
        for one in parser.arguments:
            name = ", ".join(one.option_strings) or str(one.metavar)
            taken = f" {one.metavar}" if one.option_strings and one.nargs != 0 else ""
            rows.append((code(name + taken).replace("|", "\\|"), cell(str(one.help).replace("%%", "%"))))
        if rows:
            yield table("argument | meaning", rows) + "\n"


def kind_of(value: dict[str, Any]) -> str:
    """A type of JSON schema in words."""
    if "$ref" in value:
        return f"[{(name := value['$ref'].rpartition('/')[2])}](#{name.lower()})"
    if "enum" in value or "const" in value:
        return ", ".join(code(str(one)) for one in value.get("enum", [value.get("const")]))
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(kind_of(one) for one in value["anyOf"] if one.get("type") != "null")) or "null"
    if value.get("type") == "array":
        return f"list of {kind_of(value.get('items', {}))}"
    if value.get("type") == "object":
        more = value.get("additionalProperties") or next(iter(value.get("patternProperties", {}).values()), {})
        return f"mapping to {kind_of(more if isinstance(more, dict) else {})}"
    return str(value.get("type", "any value"))


def schemas() -> Iterator[str]:
    shown = set[str]()
    for model in SCHEMAS:
        whole = model.model_json_schema(by_alias=True)
        parts = {model.__name__: whole, **whole.get("$defs", {})}
        for name, part in parts.items():
            if "properties" not in part or (model is not SCHEMAS[0] and name in shown):
                continue
            shown.add(name)
            yield f"{'##' if part is whole else '###'} {name}\n\n{text_of(part.get('description', ''))}\n"
            required = part.get("required", [])
            yield (
                table(
                    "key | value | default",
                    [
                        (code(key), kind_of(one), "required" if key in required else default_of(one))
                        for key, one in part["properties"].items()
                    ],
                )
                + "\n"
            )


def text_of(description: str) -> str:
    return "".join(f"    {one}\n".replace("    \n", "\n") for one in description.strip().splitlines())


def default_of(value: dict[str, Any]) -> str:
    default = value.get("default")
    return "" if default in (None, "", [], {}) else code(str(default).lower() if default in (True, False) else default)


def symptoms() -> Iterator[str]:
    rows = [(cell(one.meaning), cell(one.remedy)) for one in causes()]
    yield table("what the post-mortem prints | what to do", rows) + "\n"


def mistakes() -> Iterator[str]:
    """Each typed in this project, with no release."""
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, SPARKPIN_HOME=home):
        for words in MISTAKES.splitlines():
            try:
                line.run("invoke", words.split())
            except SparkpinError as error:
                printed = f"error: {error}".replace(home, "SPARKPIN_HOME").replace(f"{PROJECT}/", "")
                shortened = re.sub(r"(choose one of: (?:[^,\n]*, ){3}).*", r"\1...", printed)
                yield f"    $ invoke {words}\n" + "".join(f"    {one}\n" for one in shortened.splitlines()) + "\n"
            else:
                raise ValueError(f"invoke {words} is no mistake any more")


def issues() -> Iterator[str]:
    rows = []
    for one in manifests.load_known_issues(PROJECT):
        where = [f"{key}: {value}" for key, value in one.when.items()] + [f"model {name}" for name in one.models[:2]]
        rows.append((code(", ".join(where)), cell(one.text), cell(one.do)))
    yield table("where | what broke for others | what to do", rows) + "\n"


def exit_codes() -> Iterator[str]:
    rows = {kind.exit_code: inspect.getdoc(kind) or "" for kind in SparkpinError.__subclasses__()}
    texts = {code: re.sub(r"\s+", " ", text.partition(". Exit code")[0]) for code, text in rows.items()}
    texts |= {
        1: "`diff` or `plan` with `--exit-code`, a failed `test` or `check`; with a traceback, a fault of sparkpin",
        130: "interrupted (Ctrl-C): nothing half-made will be used",
        141: "the reader of the output has closed it (`| head`)".replace("|", "\\|"),
    }
    yield (
        table("code | meaning", [(str(code), text[:1].lower() + text[1:]) for code, text in sorted(texts.items())])
        + "\n"
    )


def published() -> Iterator[str]:
    rows = [
        (one.recipe, code(one.stage), f"{one.tokens_per_second:g}", cell(one.says), source_of(one))
        for one in manifests.load_published(PROJECT).speeds
    ]
    yield table("recipe | stage | tokens/s | how | published", rows) + "\n"


def source_of(one: schema.PublishedSpeed) -> str:
    return f"[{one.date}]({one.source})" if one.source.startswith("https:") else f"{one.date}, {one.source}"


def matrix() -> Iterator[str]:
    best: dict[str, str] = {}
    for one in sorted(manifests.load_published(PROJECT).speeds, key=lambda one: one.tokens_per_second):
        best[one.recipe] = f"{one.tokens_per_second:g}"
    rows = []
    for path in sorted((PROJECT / "recipes").glob("*.yaml")):
        recipe = manifests.load_recipe(PROJECT, path.stem)
        spark = manifests.load_stack(PROJECT, recipe.stack).gpu is not None
        where = f"{recipe.nodes} DGX Spark{'s' if recipe.nodes > 1 else ''}" if spark else "a CPU, x86-64"
        ran = "its stack's images, no server" if spark else "served, in tests or by hand"
        rows.append((code(recipe.name), recipe.model, where, code(recipe.stage), ran, best.get(recipe.name, "")))
    yield table("recipe | model | for | stage | what ran here | others, tokens/s", rows) + "\n"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    made.__name__: made for made in (commands, schemas, symptoms, mistakes, issues, exit_codes, published, matrix)
}


def filled(text: str) -> str:
    """A page with its generated parts as they are to be."""
    return PART.sub(lambda part: part[1] + "".join(PARTS[part["name"]]()), text)


def main() -> int:
    for page in sorted(PROJECT.glob("docs/*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(PROJECT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

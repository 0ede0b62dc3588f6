"""The keys of a recipe and the placeholders of its command: what nobody uses, what nobody gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sparkpin.recipes import placeholders
from sparkpin.recipes.finding import RecipeFinding, error, note
from sparkpin.recipes.recipe import LINE, MOST, V1_KEYS, V2_KEYS, CommunityRecipe
from sparkpin.recipes.render import EXPANDED
from sparkpin.recipes.sources import RUNNERS
from sparkpin.recipes.vllm_parser import nearest

JINJA = re.compile(r"(?<!\$)\{\{\s*([A-Za-z_]\w*)\s*\}\}")


def of_template(command: str, defaults: Mapping[str, Any], *, version: str) -> Iterator[RecipeFinding]:
    """Of a command and the values for it. In version 1, `model` is none of them."""
    for name in sorted(set(JINJA.findall(command))):
        yield error(f"{{{{ {name} }}}} is text here, with single braces: only Jinja fills it in", f"write {{{name}}}")
    is_first = version == "1"
    asked = placeholders.names_v1(command) if is_first else placeholders.names_v2(command, defaults)
    strange = sorted(name for name in asked or () if not placeholders.NAME.fullmatch(name))
    if asked is None or strange:
        meant = next((name.strip() for name in strange if placeholders.NAME.fullmatch(name.strip())), "")
        hint = f"write {{{meant}}} without blanks" if meant else "double the braces of JSON, {{ and }}"
        yield error("a single brace that is no placeholder: version 1 does not start", hint)
        return
    if len(asked) > MOST:
        yield error(f"{len(asked):,} different placeholders, more than any recipe has", f"at most {MOST}")
        return
    yield from of_names(command, defaults, asked, is_first=is_first)
    for name in sorted(asked & set(defaults)):
        key, value = f"defaults.{name}", defaults[name]
        if isinstance(value, dict | list):
            text = "goes into the command as Python writes it, which is no JSON"
            yield RecipeFinding("error", key, text, "hold the JSON in quotes, as text")
        elif isinstance(value, bool) or (value is None and is_first):
            yield RecipeFinding("warning", key, f"goes into the command as {value}", "write what vLLM is to read")
    for number, line in enumerate(command.splitlines(), start=1):
        if re.search(r"\\[ \t]+$", line):
            text = "a blank after the backslash: bash ends the command there"
            mended = "" if is_first else "; sparkrun removes it"
            yield RecipeFinding("error" if is_first else "note", f"command, line {number}", text + mended, "remove it")


def of_names(command: str, defaults: Mapping[str, Any], asked: set[str], *, is_first: bool) -> Iterator[RecipeFinding]:
    given, unused = set(defaults), set(defaults) - asked
    if not is_first:
        given = {name for name, value in defaults.items() if value is not None}
        given |= {"model", "resolved_model_path", "model_revision", *RUNNERS["on_a_spark"]}
        unused -= {*RUNNERS["read_anyway"]}  # by sparkrun itself
    for name in sorted(asked - given):
        hint = nearest(name, unused) or nearest(name, given) or "add it to `defaults`"
        if is_first and f"${{{name}" in command:
            hint = f"a variable of the shell is written ${{{{{name}}}}}"
        effect = "it does not start" if is_first else "the braces reach vLLM as they stand"
        lacks = "has no value in" if name in defaults else "is no key of"
        yield error(f"{{{name}}} {lacks} `defaults`: {effect}", hint)
    for name in sorted(unused):
        hint = nearest(name, asked - given) or f"remove it, or write {{{name}}} in the command"
        yield RecipeFinding("warning", f"defaults.{name}", "nothing uses it", hint)


def of_recipe(recipe: CommunityRecipe) -> Iterator[RecipeFinding]:
    """Of the file itself."""
    if recipe.version == LINE:
        return
    if recipe.said_version != recipe.version:
        text = f"{recipe.said_version}, as sparkrun does: no runner knows such a version"
        yield RecipeFinding("warning", "recipe_version", text, 'write "1" or "2"')
    for name in recipe.repeated:
        key, _, line = name.rpartition(" (")
        yield RecipeFinding("warning", key, f"stands twice ({line}: the last one counts", "remove one")
    runner, known = ("spark-vllm-docker", V1_KEYS) if recipe.version == "1" else ("sparkrun", V2_KEYS)
    for name in recipe.others:
        yield RecipeFinding("warning", name, f"{runner} does not know this key", nearest(name, known))
    if recipe.command:
        yield from of_template(recipe.command, recipe.defaults, version=recipe.version)
    else:
        for name in sorted(recipe.defaults.keys() - {*RUNNERS["flags"], "tensor_parallel", *RUNNERS["read_anyway"]}):
            hint = nearest(name, RUNNERS["flags"])
            yield RecipeFinding("warning", f"defaults.{name}", "becomes no flag: sparkrun leaves it out", hint)
    if recipe.version == "2" and "{{" in recipe.command:
        yield note("doubled braces are version 1's", "version 2 reads JSON as it is")
    for name, value in recipe.env.items():
        if recipe.version == "1" and EXPANDED.search(value):
            text, hint = "version 1 has bash expand it; in sparkpin it stays as written", "write the value itself"
            yield RecipeFinding("warning", f"env.{name}", text, hint)
        elif recipe.raw["env"].get(name, "") is None:
            yield RecipeFinding("warning", f"env.{name}", "no value: the variable is empty here", "remove it")

"""The keys of a recipe and the placeholders of its command: what nobody uses, what nobody gives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sparkpin.recipes import placeholders, structured
from sparkpin.recipes.finding import RecipeFinding, error, note
from sparkpin.recipes.recipe import LINE, MOST, RUNNERS, V1_KEYS, V2_KEYS, CommunityRecipe
from sparkpin.recipes.render import ON_A_SPARK, ONLY_BASH, RenderedRecipe, eaten
from sparkpin.recipes.vllm_parser import nearest

READ_ANYWAY = {*RUNNERS["read_anyway"]}
"""What sparkrun reads of `defaults` beside the command: its runtimes/base.py of 0.4.2 has the list."""
JINJA = re.compile(r"(?<!\$)\{\{\s*([A-Za-z_]\w*)\s*\}\}")


def of_template(command: str, defaults: Mapping[str, Any], *, version: str) -> Iterator[RecipeFinding]:
    """Of a command and the values for it. In version 1, `model` is none of them."""
    given = set(defaults)
    if version == "2":
        given = {name for name, value in defaults.items() if value is not None}
        given |= {"model", "resolved_model_path", "model_revision", *ON_A_SPARK}
    asked = placeholders.names_v1(command) if version == "1" else placeholders.names_v2(command, defaults)
    for name in sorted(set(JINJA.findall(command))):
        yield error(f"{{{{ {name} }}}} is text here, with single braces: only Jinja fills it in", f"write {{{name}}}")
    strange = sorted(name for name in asked or () if not placeholders.NAME.fullmatch(name))
    if asked is None or strange:
        meant = next((name.strip() for name in strange if placeholders.NAME.fullmatch(name.strip())), "")
        hint = f"write {{{meant}}} without blanks" if meant else "double the braces of JSON, {{ and }}"
        yield error("a single brace that is no placeholder: version 1 does not start", hint)
        return
    if len(asked) > MOST:
        yield error(f"{len(asked):,} different placeholders, more than any recipe has", f"at most {MOST}")
        return
    unused = set(defaults) - asked - (READ_ANYWAY if version == "2" else set())
    for name in sorted(asked - given):
        hint = nearest(name, unused) or nearest(name, given) or "add it to `defaults`"
        if version == "1" and f"${{{name}" in command:
            hint = f"a variable of the shell is written ${{{{{name}}}}}"
        effect = "it does not start" if version == "1" else "the braces reach vLLM as they stand"
        lacks = "has no value in" if name in defaults else "is no key of"
        yield error(f"{{{name}}} {lacks} `defaults`: {effect}", hint)
    for name in sorted(unused):
        hint = nearest(name, asked - given) or f"remove it, or write {{{name}}} in the command"
        yield RecipeFinding("warning", f"defaults.{name}", "nothing uses it", hint)
    for name in sorted(asked & set(defaults)):
        key, value = f"defaults.{name}", defaults[name]
        if isinstance(value, dict | list):
            text = "goes into the command as Python writes it, which is no JSON"
            yield RecipeFinding("error", key, text, "hold the JSON in quotes, as text")
        elif isinstance(value, bool) or (value is None and version == "1"):
            yield RecipeFinding("warning", key, f"goes into the command as {value}", "write what vLLM is to read")
    for number, line in enumerate(command.splitlines(), start=1):
        if re.search(r"\\[ \t]+$", line):
            where, hint = f"command, line {number}", "remove the blank"
            text = "a blank after the backslash: bash ends the command there"
            if version == "1":
                yield RecipeFinding("error", where, text, hint)
            else:
                yield RecipeFinding("note", where, f"{text}; sparkrun removes it", hint)


def of_recipe(recipe: CommunityRecipe) -> Iterator[RecipeFinding]:
    """Of the file itself."""
    if recipe.version != LINE and recipe.said_version != recipe.version:
        text = f"{recipe.said_version}, as sparkrun does: no runner knows such a version"
        yield RecipeFinding("warning", "recipe_version", text, 'write "1" or "2"')
    for name in recipe.repeated:
        key, _, line = name.rpartition(" (")
        yield RecipeFinding("warning", key, f"stands twice ({line}: the last one counts", "remove one")
    runner, known = ("spark-vllm-docker", V1_KEYS) if recipe.version == "1" else ("sparkrun", V2_KEYS)
    for name in recipe.others:
        yield RecipeFinding("warning", name, f"{runner} does not know this key", nearest(name, known))
    if recipe.command is None:
        for name in sorted(set(structured.unread(recipe.defaults)) - READ_ANYWAY):
            hint = nearest(name, structured.FLAGS)
            yield RecipeFinding("warning", f"defaults.{name}", "becomes no flag: sparkrun leaves it out", hint)
    elif recipe.version != LINE:
        yield from of_template(recipe.command, recipe.defaults, version=recipe.version)
        if recipe.version == "2" and "{{" in recipe.command:
            yield note("doubled braces are version 1's", "version 2 reads JSON as it is")
    for name, value in eaten(recipe).items():
        if value == ONLY_BASH:
            text, hint = "version 1 has bash expand it; in sparkpin it stays as written", "write the value itself"
        else:
            text = f"the runner's script hands over {value}"
            hint = "JSON in `env` loses its quotes in version 1; in sparkpin it keeps them"
        yield RecipeFinding("warning", f"env.{name}", text, hint)
    for name, value in recipe.env.items():
        if value == "None":
            yield RecipeFinding("warning", f"env.{name}", "no value: the variable is set to the word None", "remove it")


def of_rendered(recipe: CommunityRecipe, rendered: RenderedRecipe) -> Iterator[RecipeFinding]:
    for line in rendered.lost:
        text = f"the command has ended before this line, so the server never gets it: {line}"
        yield error(text, "look for a comment or a blank after a backslash above it")
    if rendered.plumbing:
        yield note(f"{rendered.plumbing} is no part of the server's command")
        if after := re.search(r"\s(--[a-z][\w-]*)", rendered.plumbing):
            yield error(
                f"{after[1]} stands behind {rendered.plumbing[0]}: the server does not get it", "write it before"
            )
    model = rendered.argv[2] if rendered.argv[:2] == ("vllm", "serve") and len(rendered.argv) > 2 else ""
    if recipe.model and model and model != recipe.model and not model.startswith("/"):
        text = f"the command serves {model}, and `model` is {recipe.model}: the wrong one is fetched"
        yield error(text, "name the same model")

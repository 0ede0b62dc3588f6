"""What may stand in the command and the environment of a server: one validator for what is built and what is imported.

Blanks may: JSON and chat templates have them, and nothing splits a word again. A control character may not (a line end,
NUL, ESC): a record and what is printed of it have one word a line, and NUL ends a word for the kernel. Neither may a
secret: the record, the provenance statement and every bundle repeat command and environment. Cache types that only
patched vLLMs knew may not, because a build of an hour would end in a server that refuses them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from sparkpin.core.errors import WHOLE, ManifestError
from sparkpin.pins.schema import Stage
from sparkpin.pins.vllm_flags import CACHE_TYPE, flag_value

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SECRET_FLAGS = ("--api-key", "--hf-token")  # with a value; a bare --hf-token means the one of the container's user
# Of variables that hold a secret. PATH-like ends (_FILE, _DIR) and vLLM's limits (MAX_TOKENS) are none, nor is GPG_KEY:
# in Python's own images it says whose signature was checked.
SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY)$|(?<!GPG)_KEY$", re.I)
# Values of such variables: empty, a switch (HF_HUB_DISABLE_IMPLICIT_TOKEN), or another variable's.
NO_SECRET = re.compile(r"(?:0|1|true|false|no|yes|none)?|\$\w+|\$\{\w+\}", re.I)
SHAPES = {
    "a token of the Hugging Face hub": r"\bhf_[A-Za-z0-9]{30,}",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{50,})",
    "a key of AWS": r"\bAKIA[0-9A-Z]{16}\b",
    "a key of OpenAI's or Anthropic's form": r"\bsk-[A-Za-z0-9_-]{32,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"\bhttps?://[^\s/@:'\"]+:[^\s/@'\"{}$]+@",
}
SHAPE = {what: re.compile(pattern) for what, pattern in SHAPES.items()}

# Cache types that no stage has, each with the nearest that the mod `turboquant` has and that is no coarser. The first
# two are vLLM's own, which has them without drafts; the others are those of patched releases.
BETTER = {
    "turboquant_k3v4_nc": "turboquant_4bit_nc",
    "turboquant_3bit_nc": "turboquant_4bit_nc",
    "turboquant35": "turboquant_4bit_nc",
    "turboquant25": "turboquant_4bit_nc",
    "turboquant_asym": "turboquant_k8v4",
    "turboquant_q8k_tq35v": "turboquant_k8v4",
    "turboquant_q8k_tq25v": "turboquant_k8v4",
}
MOD, STAGE = "turboquant", "v2-tq"  # the stage that adds the mod

UNSHOWN = "(not shown)"
KEY_FILE = (
    "leave it out, and change the secret if this file was ever shared; the server's key is a file, "
    "SPARKPIN_HOME/keys/RECIPE (docs/lan.md), and HF_TOKEN belongs to the shell that fetches"
)


def value_faults(argv: Sequence[str], env: Mapping[str, str], file: object) -> Iterator[ManifestError]:
    """What is wrong with words of a command line and with variables, whatever vLLM they are for. file: has them."""
    rows = [("command", word) for word in argv]
    for name, value in env.items():
        if not ENV_NAME.fullmatch(name):
            yield ManifestError(file, "env", name, "a variable's name: letters, digits and _, the first no digit")
        rows.append((f"env.{name}", value))
        if SECRET_NAME.search(name) and not NO_SECRET.fullmatch(value):
            yield secret(file, f"env.{name}", "a variable that is no secret by its name")
    yield from json_faults(argv, file)
    for key, text in rows:
        if CONTROL.search(text):
            yield ManifestError(file, key, text, "one line of text: no line end, NUL or other control character")
        yield from text_faults(text, file, key)
    for word, after in zip_longest(argv, argv[1:], fillvalue="-"):
        name, equals, _ = word.partition("=")
        if is_secret_flag(name) and (equals or not after.startswith("-")):
            yield secret(file, "command", f"a command without {name}, which would put a secret into it")
    if (kind := flag_value(argv, CACHE_TYPE)) in BETTER:
        expected = f"{BETTER[kind]}: no stage has this type"
        yield ManifestError(file, CACHE_TYPE, kind, expected)


def json_faults(argv: Sequence[str], file: object) -> Iterator[ManifestError]:
    """Words that were meant as JSON and are not: a shell eats the double quotes of JSON that is not quoted."""
    for word in argv:
        value = word.partition("=")[2] if word.startswith("-") else word
        if not re.match(r"\{(?![%#]|[A-Za-z_]\w*\}$)", value):  # a chat template, or a placeholder
            continue
        try:
            json.loads(value)
        except (ValueError, RecursionError) as error:
            quoted = "JSON in single quotes, or its placeholder, as in '{config}'"
            yield ManifestError(file, "command", value, f"JSON ({error})" if '"' in value else quoted)


def is_secret_flag(name: str) -> bool:
    """Whether argparse takes the name for one of SECRET_FLAGS: it takes what a single flag begins with."""
    return len(name) > len("--h") and any(flag.startswith(name.replace("_", "-")) for flag in SECRET_FLAGS)


def text_faults(text: str, file: object, key: str = WHOLE) -> Iterator[ManifestError]:
    """Secrets by their form, in any text."""
    for what, shape in SHAPE.items():
        if shape.search(text):
            yield secret(file, key, f"text without {what}")


def require_values(argv: Sequence[str], env: Mapping[str, str], file: object) -> None:
    for fault in value_faults(argv, env, file):
        raise fault


def secret(file: object, key: str, expected: str) -> ManifestError:
    return ManifestError(file, key, UNSHOWN, expected, next_step=KEY_FILE)


def lacks_mod(kind: str | None, chain: Sequence[Stage]) -> str:
    """What is wrong with a cache type in the image of the last stage; "" where that has the mod, or needs none.

    kind: value of the flag, None where it is not given.
    """
    if not (kind or "").startswith("turboquant_") or kind in BETTER or any(MOD in stage.mods for stage in chain):
        return ""
    where = f"{CACHE_TYPE} {kind}: the image of stage {chain[-1].name}"
    return f"{where} has no mod {MOD}, without which it is wrong or slow (mods/turboquant/README.md)"

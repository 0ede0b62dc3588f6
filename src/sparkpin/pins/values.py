"""What may stand in the command and the environment of a server: one validator for what is built and what is imported.

Blanks may: JSON and chat templates have them, and nothing splits a word again. A control character may not (a line end,
NUL, ESC): a record and what is printed of it have one word a line, and NUL ends a word for the kernel. Neither may a
secret: the record, the provenance statement and every bundle repeat command and environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from sparkpin.core.errors import WHOLE, ManifestError

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SECRET_FLAGS = ("--api-key", "--hf-token")  # with a value; a bare --hf-token means the one of the container's user
SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY)$|(?<!GPG)_KEY$", re.I)
"""Of variables that hold a secret. PATH-like ends (_FILE, _DIR) and vLLM's limits (MAX_TOKENS) are none, nor is
GPG_KEY: in Python's own images it says whose signature was checked."""

NO_SECRET = re.compile(r"(?:0|1|true|false|no|yes|none)?|\$\w+|\$\{\w+\}", re.I)
"""Values of such variables: empty, a switch (HF_HUB_DISABLE_IMPLICIT_TOKEN), or another variable's."""

SHAPES = {
    "a token of the Hugging Face hub": r"\bhf_[A-Za-z0-9]{30,}",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{50,})",
    "a key of AWS": r"\bAKIA[0-9A-Z]{16}\b",
    "a key of OpenAI's or Anthropic's form": r"\bsk-[A-Za-z0-9_-]{32,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"\bhttps?://[^\s/@:'\"]+:[^\s/@'\"{}$]+@",
}
SHAPE = {what: re.compile(pattern) for what, pattern in SHAPES.items()}

UNSHOWN = "(not shown)"
KEY_FILE = (
    "leave it out, and change the secret if this file was ever shared; the server's key is a file, "
    "SPARKPIN_HOME/keys/RECIPE (docs/serving.md), and HF_TOKEN belongs to the shell that fetches"
)


def value_faults(argv: Sequence[str], env: Mapping[str, str], file: object) -> Iterator[ManifestError]:
    """What is wrong with words of a command line and with variables, whatever vLLM they are for. file: has them."""
    rows = [("command", word) for word in argv]
    for name, value in env.items():
        if not ENV_NAME.fullmatch(name):
            yield ManifestError(file, "env", name, "a variable's name: letters, digits and _, the first no digit")
        rows.append((f"env.{name}", value))
        if SECRET_NAME.search(name) and not NO_SECRET.fullmatch(value):
            yield secret(file, f"env.{name}", "no secret, and by its name this is one")
    for key, text in rows:
        if CONTROL.search(text):
            yield ManifestError(file, key, text, "one line of text: no line end, NUL or other control character")
        yield from text_faults(text, file, key)
    for word, after in zip_longest(argv, argv[1:], fillvalue="-"):
        name, equals, _ = word.partition("=")
        if is_secret_flag(name) and (equals or not after.startswith("-")):
            yield secret(file, "command", f"no secret, and {name} has one")


def is_secret_flag(name: str) -> bool:
    """Whether argparse takes the name for one of SECRET_FLAGS: it takes what a single flag begins with."""
    return len(name) > len("--h") and any(flag.startswith(name.replace("_", "-")) for flag in SECRET_FLAGS)


def text_faults(text: str, file: object, key: str = WHOLE) -> Iterator[ManifestError]:
    """Secrets by their form, in any text."""
    for what, shape in SHAPE.items():
        if shape.search(text):
            yield secret(file, key, f"no secret, and this looks like {what}")


def require_values(argv: Sequence[str], env: Mapping[str, str], file: object) -> None:
    for fault in value_faults(argv, env, file):
        raise fault


def secret(file: object, key: str, wanted: str) -> ManifestError:
    return ManifestError(file, key, UNSHOWN, wanted, next_step=KEY_FILE)

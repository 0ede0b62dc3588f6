"""A command of a recipe, made from the words of a server, with what people change as placeholders.

It is made from words and not from text, so that whatever another format allowed (comments, plain braces, several
passes) has been read already.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from sparkpin.pins.nodes import PIPELINE, TENSOR
from sparkpin.pins.vllm_flags import parse_flags

SETTINGS = {
    "--host": "host",
    "--port": "port",
    "--served-model-name": "served_model_name",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    TENSOR: "tensor_parallel",
    PIPELINE: "pipeline_parallel",
}
INDENT = " \\\n  "
Settings = dict[str, int | float | str]


def command_of(argv: Sequence[str], *, doubled: bool) -> tuple[str, Settings]:
    """One flag a line, and the values of its placeholders. doubled: braces that are none stand twice.

    Of a flag that stands twice neither becomes a setting.
    """
    head, flags = parse_flags(argv)
    keys, text = [flag.key for flag in flags], " ".join(argv)  # sparkrun fills in what only looks like a placeholder
    settings: Settings = {}
    lines = [[quoted(word, doubled) for word in head]]
    for flag in flags:
        name, value = SETTINGS.get(flag.key), flag.words[-1]
        is_plain = len(flag.words) == 2 and keys.count(flag.key) == 1 and not re.search(r"\{[\w-]+\}|'", value)
        if name is None or not is_plain or f"{{{name}}}" in text:
            lines.append([quoted(word, doubled) for word in flag.words])
        else:
            settings[name] = number(value)
            shown = f"{{{name}}}"
            lines.append([flag.words[0], shown if shlex.quote(value) == value else f"'{shown}'"])
    return INDENT.join(map(" ".join, lines)) + "\n", settings


def quoted(word: str, doubled: bool) -> str:
    return shlex.quote(re.sub(r"([{}])", r"\1\1", word) if doubled else word)


def number(text: str) -> int | float | str:
    """A number where it comes back as the same text: 0.90 would not."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if str(value) == text:
            return value
    return text

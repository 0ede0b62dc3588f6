"""Typed reading of the command line of `vllm serve`, and what of it nobody read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.pins.vllm_command import Flag, parse_flags

AUTO, SPECULATION = -1, "--speculative-config"
DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
NEXT = "correct the command or the flags of recipe, stack or stage"
NEUTRAL = frozenset((
    "--allow-credentials", "--allowed-headers", "--allowed-methods", "--allowed-origins", "--api-key",
    "--async-scheduling", "--attention-backend", "--chat-template", "--chat-template-content-format", "--config",
    "--default-chat-template-kwargs", "--disable-log-requests", "--disable-log-stats", "--disable-uvicorn-access-log",
    "--distributed-executor-backend", "--download-dir", "--enable-auto-tool-choice", "--enable-chunked-prefill",
    "--enable-expert-parallel", "--enable-force-include-usage", "--enable-log-outputs", "--enable-log-requests",
    "--enable-prompt-tokens-details", "--gdn-prefill-backend", "--generation-config", "--headless", "--host",
    "--load-format", "--master-addr", "--master-port", "--max-log-len", "--max-logprobs",
    "--model-loader-extra-config", "--moe-backend", "--nnodes", "--node-rank", "--offload-backend",
    "--override-generation-config", "--port", "--prefix-caching-hash-algo", "--quantization", "--reasoning-parser",
    "--reasoning-parser-plugin", "--response-role", "--revision", "--root-path", "--safetensors-load-strategy",
    "--scheduling-policy", "--seed", "--served-model-name", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-certfile",
    "--ssl-keyfile", "--stream-interval", "--structured-outputs-config", "--tokenizer", "--tokenizer-mode",
    "--tokenizer-revision", "--tool-call-parser", "--tool-parser-plugin", "--trust-remote-code", "--uds",
    "--uvicorn-log-level",
))  # fmt: skip
"""Flags of vLLM 0.32 and 0.33 that change nothing that a plan counts."""


WANTED = "flags whose effect on the caches this plan knows"


class Flags:
    """Typed access to a command line; of a flag that stands twice the last one counts."""

    def __init__(self, argv: Sequence[str], origin: str, origins: Mapping[str, str]) -> None:
        """origins: flag -> the file that sets it; origin: for all others."""
        self._flags, self._origin, self._origins = parse_flags(argv)[1], origin, origins
        self._read: set[str] = set()

    def origin(self, key: str) -> str:
        return self._origins.get(key, self._origin)

    def unread(self) -> tuple[str, ...]:
        """Flags that nobody asked for and that may take memory, as they were given."""
        known = self._read | NEUTRAL
        return tuple(" ".join(flag.words) for flag in self._flags if flag.key.partition(".")[0] not in known)

    def values(self, key: str) -> list[Flag]:
        self._read.add(key)
        return [flag for flag in self._flags if flag.key == key]

    def text(self, key: str) -> str | None:
        found = self.values(key)
        return found[-1].value if found else None

    def on(self, key: str, *, default: bool = False) -> bool:
        """Of a bare flag and its `--no-` form: Flag.key is the same for both."""
        found = self.values(key)
        return not found[-1].words[0].startswith("--no-") if found else default

    def refuse(self, **neutral: str) -> None:
        """Raise for each of these flags with any value but the one that has no effect."""
        for name, nothing in neutral.items():
            key = "--" + name.replace("_", "-")
            text = self.text(key)
            if text is not None and re.sub(r"\.0*$", "", text) != nothing:
                raise ManifestError(self.origin(key), key, text, WANTED, next_step=NEXT)

    def number(self, key: str, *, auto: bool = False) -> int | None:
        text = self.text(key)
        if text is None:
            return None
        if auto and text in ("-1", "auto"):
            return AUTO
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
        if not found or ("." in found[1] and found[2] not in DECIMAL) or float(found[1]) == 0:
            raise ManifestError(
                self.origin(key), key, text, "a positive number such as 32768, 32k or 32K", next_step=NEXT
            )
        if found[2] in DECIMAL:
            return int(float(found[1]) * DECIMAL[found[2]])
        return int(found[1]) * BINARY.get(found[2], 1)

    def fraction(self, key: str) -> float | None:
        text = self.text(key)
        if text is None:
            return None
        if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text) or not 0 < float(text) <= 1:
            raise ManifestError(self.origin(key), key, text, "a number above 0 and not above 1", next_step=NEXT)
        return float(text)

    def _mapping(self, flag: Flag) -> dict[str, Any]:
        try:
            value = json.loads(flag.value or "")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ManifestError(self.origin(flag.key), flag.key, flag.value, "a JSON object", next_step=NEXT)
        return value

    def json(self, key: str) -> dict[str, Any]:
        """A flag's mapping, parts of it given as `--flag.part value` included. Dashes in its keys stay, except where
        vLLM 0.32 and 0.33 change them (engine/arg_utils.py, create_speculative_config)."""
        self._read.add(key)
        value: dict[str, Any] = {}
        for flag in self._flags:
            if flag.key == key:
                value = self._mapping(flag)
            elif flag.key.startswith(key + "."):
                part = flag.words[0].partition("=")[0].partition(".")[2]
                value = {**value, part: read_json(flag.value) if flag.value else flag.value}
        return {name.replace("-", "_"): one for name, one in value.items()} if key == SPECULATION else value


def read_json(text: str) -> Any:
    """The value of a part, as vLLM 0.33 reads it (utils/argparse_utils.py): text where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

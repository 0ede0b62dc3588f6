"""What a mod does is told in one line of the server's log, which the smoke test reads."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARKER = "SPARKPIN_MOD"
EVENTS = ("active", "off", "failed", "kernels", "compiled", "checked", "agreed")
_LOGGER = "vllm.sparkpin"
_in_use: dict[str, str] = {}


def report(mod: str, event: str, **details: Any) -> None:
    """Write one line ``SPARKPIN_MOD {"mod":...,"event":...,...}`` to the log.

    Args:
        mod: name of the mod, as in ``mods/<name>``.
        event: "active" (in use in this process, not merely installed), "off" (switched off), "failed"; of
            `sparkpin_modkit.ranks`: "agreed" (with the server's other processes); of `sparkpin_modkit.kernels`:
            "kernels" (where those of a warm-up came from) and "compiled" (one after it); of
            `sparkpin_modkit.selfcheck`: "checked".
        details: values for JSON; anything else is written as its ``str``.

    The line goes through vLLM's logger; where that would drop it (level above INFO, no handler), to stderr instead.
    """
    if event not in EVENTS:
        raise ValueError(f"event {event!r}: expected one of {', '.join(EVENTS)}")
    if event == "active":
        _in_use[mod] = str(details.get("version"))
    line = f"{MARKER} {json.dumps({'mod': mod, 'event': event, **details}, separators=(',', ':'), default=str)}"
    logger = _vllm_logger()
    if logger is None or not _reaches_a_handler(logger):
        print(line, file=sys.stderr, flush=True)
    else:
        logger.info("%s", line, stacklevel=2)


def in_use() -> dict[str, str]:
    """Mods that have reported "active" in this process, with their versions."""
    return dict(_in_use)


@contextmanager
def reporting_failure(mod: str, **details: Any) -> Iterator[None]:
    """Report "failed" for any exception that leaves the block, then let it go on."""
    try:
        yield
    except Exception as error:
        report(mod, "failed", error=f"{type(error).__name__}: {error}", **details)
        raise


def _vllm_logger() -> logging.Logger | None:
    try:
        from vllm.logger import init_logger
    except ImportError:
        return None
    logger: logging.Logger = init_logger(_LOGGER)
    return logger


def _reaches_a_handler(logger: logging.Logger) -> bool:
    if logger.disabled or not logger.isEnabledFor(logging.INFO):
        return False
    current: logging.Logger | None = logger
    while current is not None:
        if any(h.level <= logging.INFO and not isinstance(h, logging.NullHandler) for h in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False

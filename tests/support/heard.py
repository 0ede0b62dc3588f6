"""Lines of progress, as a person gets them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparkpin.core.terminal import LOG


def heard(act: Callable[[str], object] | None = None) -> list[str]:
    """A list that takes every line from now on; conftest.py ends it with the test. act: called with each."""
    lines: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.msg)
        if act:
            act(record.msg)

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    LOG.addHandler(handler)
    return lines

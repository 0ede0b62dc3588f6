"""A line as a person types it, read and run in this process: `invoke` alone takes a third of a second to start."""

from __future__ import annotations

import signal

import pytest

from sparkpin.cli.line import main
from sparkpin.core import terminal


def typed(line: str | list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `sparkpin LINE`."""
    words = line.split() if isinstance(line, str) else line
    former = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    capsys.readouterr()
    code = 0
    try:
        main("sparkpin", words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        terminal.Typed.program = "invoke"
        for number, handler in former:
            signal.signal(number, handler)
    return code, *capsys.readouterr()

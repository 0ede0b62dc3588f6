"""A checkout whose tasks run in this process: without the second that another Python takes to start."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from subprocess import CompletedProcess
from typing import NoReturn
from unittest import mock

from checkout import Checkout

from sparkpin.cli.line import main
from sparkpin.core import terminal
from sparkpin.core.paths import Paths


class CheckoutHere(Checkout):
    """Only the data that people edit is copied: the code is that of the tests."""

    CODE = ()

    def invoke(self, *arguments: str, **env: str) -> CompletedProcess[str]:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            mock.patch.dict(os.environ, {"SPARKPIN_HOME": str(self.home), **env}),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            paths = replace(Paths.from_env(), project=self.folder)
            with mock.patch.object(Paths, "from_env", lambda *_: paths):
                try:
                    main("sparkpin", arguments)
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 1
                finally:
                    terminal.Typed.program = "invoke"
        return CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def start(self, *arguments: str) -> NoReturn:
        raise NotImplementedError("a task that runs beside the test needs a process: Checkout")

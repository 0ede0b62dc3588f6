"""One file for each noun of the command line: it parses, calls one room, and prints.

`cli.serve` is imported when it is named: a task loads what it uses, `invoke --list` loads none of these.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkpin.cli import (  # noqa: F401 # isort: skip
        bench, bisect, build, bump, bundle, checkpoint, client, developer, evidence, history, lock,
        prove, prune, quality, recipe, releases, report, reproduce, serve, smoke, status, up,
    )  # fmt: skip
else:

    def __getattr__(name: str) -> Any:
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(name) from None

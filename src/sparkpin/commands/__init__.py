"""One file for each noun of the command line: it parses, calls one room, and prints.

`commands.serve` is imported when it is named: a task loads what it uses, `invoke --list` loads none of these.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkpin.commands import bench as bench
    from sparkpin.commands import bisect as bisect
    from sparkpin.commands import build as build
    from sparkpin.commands import bundle as bundle
    from sparkpin.commands import checkpoint as checkpoint
    from sparkpin.commands import client as client
    from sparkpin.commands import developer as developer
    from sparkpin.commands import evidence as evidence
    from sparkpin.commands import history as history
    from sparkpin.commands import inspect as inspect
    from sparkpin.commands import lock as lock
    from sparkpin.commands import prune as prune
    from sparkpin.commands import quality as quality
    from sparkpin.commands import recipe as recipe
    from sparkpin.commands import releases as releases
    from sparkpin.commands import report as report
    from sparkpin.commands import roofline as roofline
    from sparkpin.commands import serve as serve
    from sparkpin.commands import smoke as smoke
    from sparkpin.commands import status as status
    from sparkpin.commands import up as up
else:

    def __getattr__(name: str) -> Any:
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(name) from None

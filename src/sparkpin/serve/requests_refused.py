"""Requests that vLLM does not survive, by the reason that their sender is told.

The front's container has this file, too: standard library alone.
"""

from __future__ import annotations

from typing import Any


def refusal(path: str, body: dict[str, Any]) -> str | None:
    """Why a request is not passed on (it is answered with 400); None for one that may be.

    path: as in `rules.PATHS`; body: its JSON, within the limits of size and depth.
    """
    return None

"""Builds and imports keep what they have written, or found there, until a release's record names it.

They share a lock that `prune` takes alone: nothing that it then sees has just been taken by a run for its own. A home
may be used with several caches, and a cache with several homes, so there is one in each, always taken in this order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from sparkpin.core import files
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say

LOCK = "prune.lock"


@contextlib.contextmanager
def claim(paths: Paths, say: Say) -> Iterator[None]:
    """No prune removes anything meanwhile. Runs that claim do not wait for each other."""
    with hold(paths, lambda: say("waiting for a prune to end"), shared=True):
        yield


@contextlib.contextmanager
def alone(paths: Paths, say: Say) -> Iterator[None]:
    """For prune: no run has claimed anything. Take it before all other locks, for builds take theirs after it."""
    with hold(paths, lambda: say("waiting for builds and imports that run now to end"), shared=False):
        yield


@contextlib.contextmanager
def hold(paths: Paths, on_wait: Callable[[], None], *, shared: bool) -> Iterator[None]:
    with (
        files.lock(paths.home / LOCK, shared=shared, on_wait=on_wait),
        files.lock(paths.locks / LOCK, shared=shared, on_wait=on_wait),
    ):
        yield

"""A release served with other numbers of drafted tokens than its own flags say.

vLLM 0.32 and 0.33 take that number when they start. (`num_speculative_tokens_per_batch_size` changes it with the number
of requests, not for a request.) So each takes a server of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from sparkpin.memory.flags import Flags
from sparkpin.recipes import drop_flags, parse_flags, set_flag
from sparkpin.releases import Release

FLAG, KEY = "--speculative-config", "num_speculative_tokens"


def drafted(release: Release) -> int:
    """Tokens that its own flags let it draft; 0 for none."""
    return int(Flags(release.argv, "the release's command", {}).json(FLAG).get(KEY) or 0)


def variants(release: Release) -> Iterator[tuple[int, Release]]:
    """How many tokens, and the release with flags that say so: itself first, then each other length it is to prove."""
    own = drafted(release)
    yield own, release
    for length in release.demands.draft_lengths:
        if length != own:
            yield length, dataclasses.replace(release, argv=tuple(with_length(release, length)))


def with_length(release: Release, length: int) -> list[str]:
    parts = [flag.key for flag in parse_flags(release.argv)[1] if flag.key.startswith(f"{FLAG}.")]
    argv = drop_flags(release.argv, *parts)
    if not length:
        return drop_flags(argv, FLAG)
    config = Flags(release.argv, "the release's command", {}).json(FLAG)
    return set_flag(argv, FLAG, {**config, KEY: length})

"""A release served with other numbers of drafted tokens than its own flags say.

vLLM 0.32 and 0.33 take that number when they start. So each takes a server of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from sparkpin.core.errors import ManifestError
from sparkpin.pins.drafters import FLAG, speculation
from sparkpin.pins.drafters import TOKENS as KEY
from sparkpin.pins.schema import Stage
from sparkpin.pins.vllm_flags import drop_flags, parse_flags, set_flag
from sparkpin.releases.record import Release


def drafted(release: Release) -> int:
    """Tokens that its own flags let it draft; 0 for none."""
    return int(speculation(release.argv).get(KEY) or 0)


def require_drafter(stage: Stage, recipe: str, argv: Sequence[str]) -> None:
    """ManifestError where the stage wants drafts of a length proven, and the recipe serves it without a drafter: a
    number alone says not what should draft.
    """
    if any(stage.smoke.draft_lengths) and not speculation(argv):
        raise ManifestError(
            f"stages/{stage.name}.yaml",
            "smoke.draft_lengths",
            stage.smoke.draft_lengths,
            f"none but 0: recipe {recipe!r} serves this stage without {FLAG}, so there is nothing that drafts",
            next_step=f"set {FLAG} (method and {KEY}) under serve.flags of stages/{stage.name}.yaml or in "
            f"recipes/{recipe}.yaml, or leave draft_lengths out",
        )


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
    return set_flag(argv, FLAG, {**speculation(release.argv), KEY: length})

"""What to do about locked files that their index or mirror no longer offers."""

from __future__ import annotations

from collections.abc import Sequence

from sparkpin.pins.schema import LockedFile


def how_to_get(lost: Sequence[LockedFile]) -> str:
    """What to type next, in one line."""
    what = "it" if len(lost) == 1 else "them"
    return (
        f"`invoke import FILE` of a bundle that was exported `--with-store` brings {what} back; images that were "
        f"published need none of {what}: `invoke up --from oci://HOST/NAME`; `invoke lock` takes what is offered now"
    )

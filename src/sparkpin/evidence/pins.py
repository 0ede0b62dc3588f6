"""A release's project as far as `manifests` reads it, for `verify` and `bundle`: whoever wrote it may be hostile."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from sparkpin.core.errors import IntegrityError, SparkpinError
from sparkpin.core.files import disk_errors
from sparkpin.releases.record import Release

PINS = re.compile(r"(?:pins/models|pins/stacks|stages|dockerfiles)/[^/]+|mods/[^/]+/pyproject\.toml")


def pin_names(release: Release) -> list[str]:
    return [name for name in release.inputs if PINS.fullmatch(name)]


@contextlib.contextmanager
def pins_of(release: Release, read: Callable[[str], bytes]) -> Iterator[Path]:
    """A temporary folder with these files. read: gives the bytes of one.

    Their names must be such that they lie in it (`names.is_plain`). IntegrityError for a pin that `manifests` does not
    take in the body, DiskError.
    """
    with tempfile.TemporaryDirectory(prefix="sparkpin-pins-") as folder:
        for name in pin_names(release):
            data, target = read(name), Path(folder, name)
            with disk_errors(Path(folder)):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        try:
            yield Path(folder)
        except (SparkpinError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            why = str(getattr(error, "message", error)).replace(f"{folder}/", "")
            raise IntegrityError(f"the pins of {release.tag}: {why}") from None

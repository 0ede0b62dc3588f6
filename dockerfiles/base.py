"""Runs inside a build step: end the build where a base by digest is not what its stack says.

usage: base.py PYTHON GLIBC  PYTHON: full version of its python3; GLIBC: minor version of its 2.x

Wheels are chosen for both when the stack is locked, long before anybody starts a program of the base.
"""

from __future__ import annotations

import os
import platform
import sys


def seen() -> tuple[str, str]:
    """Python's version, and the C library as it names itself ("glibc 2.36")."""
    try:
        return platform.python_version(), os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except ValueError:  # as with musl
        return platform.python_version(), "another C library"


def main(python: str, glibc: str) -> None:
    for key, value, wanted in zip(("python", "glibc"), seen(), (python, f"glibc 2.{glibc}"), strict=True):
        if value != wanted:
            sys.exit(f"base.{key} of the stack says {wanted}, and the image has {value}: correct it, and lock again")


if __name__ == "__main__":
    main(*sys.argv[1:])

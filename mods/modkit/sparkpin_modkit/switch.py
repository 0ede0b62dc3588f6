"""Each mod is switched by one environment variable."""

from __future__ import annotations

import os

from sparkpin_modkit.errors import BadSwitch


def switch_name(mod: str) -> str:
    """Name of the variable that switches `mod`: ``int8-lm-head`` -> ``SPARKPIN_MOD_INT8_LM_HEAD``."""
    return "SPARKPIN_MOD_" + mod.upper().replace("-", "_")


def enabled(mod: str, default: bool = True) -> bool:
    """Whether `mod` is switched on.

    Raises:
        BadSwitch: the variable is set to anything but "0" or "1" (an empty value included).
    """
    name = switch_name(mod)
    value = os.environ.get(name)
    if value is None:
        return default
    if value not in ("0", "1"):
        raise BadSwitch(f"{name}={value!r}: expected 0 or 1. Set {name}=1 to use {mod}, {name}=0 to leave it out.")
    return value == "1"

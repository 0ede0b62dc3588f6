"""One class per way in which a mod can refuse to run."""

from __future__ import annotations

EXIT_CODE = 78
"""EX_CONFIG of sysexits.h: the process stops because it is set up wrongly."""


class ModError(RuntimeError):
    """A mod cannot do what it was asked to do; the server must not start without it."""


class BadSwitch(ModError):
    """A ``SPARKPIN_MOD_*`` variable holds something other than "0" or "1"."""


class UnsupportedVLLM(ModError):
    """The installed vLLM is not a version that the mod was written for."""


class UnsupportedPlatform(ModError):
    """The mod has no implementation for the platform that vLLM runs on."""


class SignatureChanged(ModError):
    """What the mod touches is missing, takes other parameters than it was written against, or is other code."""


class RanksDiffer(ModError):
    """The processes of one server do not have the same release, mods or switches, or do not meet."""

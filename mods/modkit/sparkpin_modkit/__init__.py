"""Shared by every sparkpin mod: the switch, the checks before vLLM is changed, and the one-line reports.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

from sparkpin_modkit.checks import Touches, check_signature, check_vllm, require_vllm
from sparkpin_modkit.errors import (
    EXIT_CODE,
    BadSwitch,
    ModError,
    RanksDiffer,
    SignatureChanged,
    UnsupportedPlatform,
    UnsupportedVLLM,
)
from sparkpin_modkit.plugin import install_once
from sparkpin_modkit.reports import MARKER, report, reporting_failure
from sparkpin_modkit.switch import enabled, switch_name

__all__ = [
    "EXIT_CODE",
    "MARKER",
    "BadSwitch",
    "ModError",
    "RanksDiffer",
    "SignatureChanged",
    "Touches",
    "UnsupportedPlatform",
    "UnsupportedVLLM",
    "check_signature",
    "check_vllm",
    "enabled",
    "install_once",
    "report",
    "reporting_failure",
    "require_vllm",
    "switch_name",
]

"""INT4 and block-FP8 linear layers side by side in one AutoRound (INC) checkpoint."""

from __future__ import annotations

MOD = "hybrid-int4-fp8"
VERSION = "0.1.0"


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once and in every process."""
    from sparkpin_modkit import install_once

    install_once(MOD, VERSION, _install)


def _install() -> None:
    from sparkpin_hybrid.hook import install

    install()

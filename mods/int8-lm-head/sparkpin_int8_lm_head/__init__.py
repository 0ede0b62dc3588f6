"""INT8 LM head: half the bytes of the largest matrix that every decoded token reads."""

from __future__ import annotations

MOD = "int8-lm-head"
VERSION = "0.1.0"


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once and in every process."""
    from sparkpin_modkit import install_once

    install_once(MOD, VERSION, _install)


def _install() -> None:
    from sparkpin_int8_lm_head.hook import install

    install()

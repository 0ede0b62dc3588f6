"""4-bit K and V cache: random rotation, Lloyd-Max code, attention computed in the rotated space."""

from __future__ import annotations

MOD = "turboquant"
VERSION = "0.1.0"


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once and in every process."""
    from sparkpin_modkit import install_once

    install_once(MOD, VERSION, _install)


def _install() -> None:
    from sparkpin_turboquant.hook import install

    install()

"""Requests that end or stall vLLM are refused: `vllm serve ... --middleware sparkpin_guard.Guard`."""

from __future__ import annotations

from sparkpin_guard.guard import MOD, VERSION, Guard

__all__ = ["MOD", "VERSION", "Guard", "register"]


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once and in every process."""
    from sparkpin_modkit import install_once

    install_once(MOD, VERSION, _install)


def _install() -> None:
    """Nothing in vLLM is replaced, which itself makes the `Guard` of the flag."""
    from sparkpin_modkit import check_vllm

    from sparkpin_guard.touches import TOUCHES

    check_vllm(TOUCHES)

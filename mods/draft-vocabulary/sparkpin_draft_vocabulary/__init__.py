"""Drafting from part of the vocabulary: a draft reads a few rows of the LM head instead of all."""

from __future__ import annotations

MOD = "draft-vocabulary"
VERSION = "0.1.0"


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once and in every process."""
    from sparkpin_modkit import install_once

    install_once(MOD, VERSION, _install)


def _install() -> None:
    from sparkpin_draft_vocabulary.hook import install

    install()

"""Tiny Qwen3.5-MoEs: one whose answers are known, and (`packed`) one that was trained.

They let the whole flow (fetch, checkpoint surgery, serving, smoke tests) run for real without a GPU or a download.
"""

from __future__ import annotations

from sparkpin.fetch.tinymodel.network import FORMS
from sparkpin.fetch.tinymodel.repositories import (
    FP8_REPO,
    INT4_REPO,
    commit_of,
    config_ahead,
    files_of,
    generate,
    generate_plain,
)

__all__ = ["FORMS", "FP8_REPO", "INT4_REPO", "commit_of", "config_ahead", "files_of", "generate", "generate_plain"]

"""The one moment that every built byte is dated with."""

from __future__ import annotations

# 2026-01-01T00:00:00Z. A fixed moment instead of a commit's date: an image must not change because a README did.
EPOCH = 1767225600

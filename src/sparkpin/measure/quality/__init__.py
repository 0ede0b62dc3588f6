"""What a release has lost against another: docs/quality.md."""

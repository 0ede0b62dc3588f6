"""What a release has lost: docs/quality.md. `record` and `promotion` load fast; `tasks` asks servers."""

"""How fast a release is: measured by vLLM's own load generator, kept with the release (docs/bench.md)."""

"""How fast a release is: requests that are timed as a client sees them, kept with the release (docs/bench.md)."""

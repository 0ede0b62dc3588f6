"""`invoke bisect`: which change between two releases turns a check (docs/bisect.md)."""

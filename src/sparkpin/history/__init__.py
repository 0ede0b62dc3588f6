"""More than one release: what changed between two, and where a file comes from."""

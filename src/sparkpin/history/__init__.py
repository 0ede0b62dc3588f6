"""More than one release: what changed, where a file comes from, `bisect`, `report`, `prune`."""

"""Whether caching, concurrency or drafting change a server's answers."""

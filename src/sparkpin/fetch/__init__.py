"""Lock and fetch: the only room that uses the network. What it brings is verified before anything reads it."""

"""What changed between two releases, and where a file of an image comes from, in words for people."""

"""An image's libraries and plugins, loaded where they cannot serve: no GPU, and a stub for its driver."""

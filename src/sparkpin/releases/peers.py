"""How the containers of a release for several machines meet, and end together. Standard library alone."""

KEY = "peers.key"
SILENT = 10

"""Configurations for the tools that talk to a server: docs/clients.md."""

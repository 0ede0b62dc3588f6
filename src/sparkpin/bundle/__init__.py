"""A release carried to another machine: export, import, copy."""

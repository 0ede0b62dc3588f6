"""Newer versions, tried on the side of the current release."""

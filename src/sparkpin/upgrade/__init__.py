"""Newer versions beside the current release (`bump`), and which change made a release worse (`bisect`)."""

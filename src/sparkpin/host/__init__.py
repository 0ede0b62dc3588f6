"""This machine: its hardware, its packages, its Docker engine, and other engines over ssh."""

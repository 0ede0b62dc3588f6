"""What can be said of an image where no server of it can run: docs/inspection.md."""

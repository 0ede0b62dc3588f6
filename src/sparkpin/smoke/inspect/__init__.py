"""What can be said of an image without running it and without a GPU: docs/inspection.md."""

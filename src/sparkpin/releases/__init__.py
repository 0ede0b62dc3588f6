"""Release records: which there are, which is current, which are kept, and the container that one runs in."""

"""How fast, how good and how steady a release is: `bench`, `quality` and `prove`."""

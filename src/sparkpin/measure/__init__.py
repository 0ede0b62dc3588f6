"""How fast and how good a release is: `bench`, `quality`, and the `roofline` that no release can pass."""

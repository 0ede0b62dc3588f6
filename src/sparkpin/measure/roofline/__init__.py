"""How fast a recipe's decode can be at most: bytes that a step must read, over a memory's bandwidth."""

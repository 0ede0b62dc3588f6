"""The memory that a recipe's server will take, and the speed that the memory allows it: what `plan` prints."""

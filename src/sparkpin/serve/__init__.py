"""A server that stays up (docs/serving.md), the clients that use it, and the memory that it will need."""

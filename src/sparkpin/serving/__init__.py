"""A server that stays up (docs/serving.md): what watches it, starts it, swaps it, and tells why it died."""

"""Byte-level surgery on safetensors checkpoints, without torch or numpy."""

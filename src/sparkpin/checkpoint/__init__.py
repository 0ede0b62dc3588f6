"""Byte-level surgery on safetensors checkpoints, without torch, an engine or the network."""

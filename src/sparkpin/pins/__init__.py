"""The files that people edit, their schemas, and the `vllm serve` command that they come to. No network, no engine."""

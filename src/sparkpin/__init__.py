"""Reproducible image builds for serving large language models with vLLM on a DGX Spark."""

__version__ = "0.1.0"

"""Recipes of other tools: read as their own runners read them, checked, taken over, and written for them.

Version 1 is spark-vllm-docker's (`run-recipe.py`), version 2 sparkrun's. Both end in a bash script or `bash -c` in a
container; `recipe show` says which words and which environment the server gets from it, without running anything.
"""

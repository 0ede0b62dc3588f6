"""Asks sparkrun's own renderer for the command and environment of each recipe that is named, one line of JSON each."""

from __future__ import annotations

import json
import sys

from sparkrun.core.recipe import Recipe
from sparkrun.runtimes.vllm_distributed import VllmDistributedRuntime

for path in sys.argv[1:]:
    recipe = Recipe.load(path)
    command = VllmDistributedRuntime().generate_command(recipe, {}, is_cluster=False)
    print(json.dumps([command, {name: str(value) for name, value in recipe.env.items()}]))

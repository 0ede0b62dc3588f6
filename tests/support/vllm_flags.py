"""Runs in an image: what its vLLM's own parser takes, as JSON. Flag -> kind as in benchmarks/wheelflags.py."""

import argparse
import json

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

found = {}
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    names = [name for name in action.option_strings if name.startswith("--")]
    if names and names[0] != "--help":
        kind = {0: "bare", "?": "maybe"}.get(action.nargs, "value")
        kind = "switch" if isinstance(action, argparse.BooleanOptionalAction) else kind
        choices = sorted(str(choice) for choice in action.choices or () if choice is not None)
        others = [name for name in action.option_strings if name != names[0] and not name.startswith("--no-")]
        found[names[0]] = {"kind": kind, "choices": choices, "also": others}
print("FLAGS", json.dumps(found))

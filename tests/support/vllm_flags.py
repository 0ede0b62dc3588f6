"""Runs in an image: which command lines its vLLM's own parser takes. /forms.json: a list of words each."""

import contextlib
import io
import json
from pathlib import Path

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
taken = []
for words in json.loads(Path("/forms.json").read_text()):
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parser.parse_args(["model", *words])
        taken.append(True)
    except (SystemExit, Exception):
        taken.append(False)
print("TAKEN", json.dumps(taken))

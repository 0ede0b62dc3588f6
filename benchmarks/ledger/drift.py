"""How far does rounding each step's state drift over a long text: `drift.py read NAME --url URL`, then `drift.py tell`.

A prompt that is read in steps of one token (`--max-num-batched-tokens 1 --max-num-seqs 1`) is written to the state as
often as in decoding, while its log-probabilities are of a given text. Each server reads two files of Python's own
library; `tell` compares all of them with `--against`, by place.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import sys
import typing
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sparkpin.measure.quality import distance
from sparkpin.smoke import logprobs

TEXTS = (argparse, typing)
PLACES = (0, 1024, 2048, 4096, 8192, 12288, 16384)  # tokens
SECONDS = 3600.0


def read(name: str, url: str, most: int, out: Path) -> None:
    with httpx.Client(base_url=url, timeout=SECONDS) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for module in TEXTS:
            asked = {"model": model, "prompt": inspect.getsource(module), "add_special_tokens": False}
            tokens = http.post("/tokenize", json=asked).raise_for_status().json()["tokens"][:most]
            body = {
                "model": model,
                "prompt": tokens,
                "temperature": 0,
                "max_tokens": 1,
                "prompt_logprobs": distance.TOP,
            }
            reply = http.post("/v1/completions", json=body).raise_for_status()
            found = {"tokens": tokens, "prompt_logprobs": reply.json()["choices"][0]["prompt_logprobs"]}
            (out / f"{name}-{module.__name__}.json").write_text(json.dumps(found))
            print(f"{name}: {module.__name__}, {len(tokens):,} tokens", flush=True)


def rows(out: Path, name: str, text: str) -> distance.Rows:
    found = json.loads((out / f"{name}-{text}.json").read_text())
    return distance.rows_of(logprobs.prompt_rows(found, f"{name}-{text}", found["tokens"]))


def tell(against: str, out: Path) -> None:
    spans = list(itertools.pairwise(PLACES))
    print("| states | text |", " | ".join(f"{low:,} to {high:,}" for low, high in spans), "|")
    print("|---" * (len(spans) + 2) + "|")
    for module in TEXTS:
        reference = rows(out, against, module.__name__)
        for path in sorted(out.glob(f"*-{module.__name__}.json")):
            name = path.name.removesuffix(f"-{module.__name__}.json")
            if name != against:
                other = rows(out, name, module.__name__)
                kl, same = distance.kl(reference, other, distance.TOP), distance.agreement(reference, other)
                cells = (f"{kl[low:high].mean():.5f}, {same[low:high].mean():.1%}" for low, high in spans)
                print(f"| {name} | {module.__name__} |", " | ".join(cells), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=("read", "tell"))
    parser.add_argument("name", nargs="?", default="server", help="of what is served")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--against", default="float32")
    parser.add_argument("--out", type=Path, default=Path("drift"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.act == "read":
        read(asked.name, asked.url.rstrip("/"), asked.tokens, asked.out)
    else:
        tell(asked.against, asked.out)

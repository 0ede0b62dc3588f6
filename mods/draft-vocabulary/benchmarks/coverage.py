"""What share of texts' tokens a list leaves out. A tokenizer, no model.

usage: python coverage.py TOKENIZER FOLDER [--first 16384 32768 65536]      shares, by the folder's folders

TOKENIZER: a tokenizer.json (needs the distribution tokenizers), or ranks as *.tiktoken with Qwen3.5's split (needs
tiktoken). A token that is not listed is never drafted, so each one costs at least one draft. It is no acceptance: a
drafter misses others, too, and what a model says is not these texts.
"""

from __future__ import annotations

import argparse
import base64
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
Encode = Callable[[str], list[int]]


def tokenizer(path: Path) -> Encode:
    if path.suffix == ".json":
        from tokenizers import Tokenizer

        made = Tokenizer.from_file(str(path))
        return lambda text: list(made.encode(text, add_special_tokens=False).ids)
    import tiktoken

    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    encoding = tiktoken.Encoding(path.stem, pat_str=QWEN_SPLIT, mergeable_ranks=ranks, special_tokens={})
    return lambda text: encoding.encode_ordinary(unicodedata.normalize("NFC", text))


def counts(encode: Encode, folder: Path) -> dict[str, Counter[int]]:
    """Ids of the texts by the name of the folder that they lie in."""
    found: dict[str, Counter[int]] = {}
    for path in sorted(folder.rglob("*.txt")):
        found.setdefault(path.parent.name, Counter()).update(encode(path.read_text(encoding="utf-8")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, nargs="+", default=[16384, 32768, 65536])
    arguments = parser.parse_args()
    found = counts(tokenizer(arguments.tokenizer), arguments.folder)
    found["all"] = sum(found.values(), Counter())
    print("| texts | tokens | " + " | ".join(f"not in the first {first:,}" for first in arguments.first) + " |")
    print("|" + "---|" * (2 + len(arguments.first)))
    for name, ids in found.items():
        outside = [sum(n for token, n in ids.items() if token >= first) / ids.total() for first in arguments.first]
        print(f"| {name} | {ids.total():,} | {' | '.join(f'{share:.1%}' for share in outside)} |")


if __name__ == "__main__":
    main()

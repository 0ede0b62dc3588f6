"""The texts of `trained-tiny`, out of Debian 12's packages, and the tasks that `tasks.py` makes up, as tokens.

usage: python corpus.py OUT [--debs FOLDER]

Fetches the packages of PACKAGES with `apt-get download` where FOLDER does not have them, and checks each one's sha256.
OUT gets tokenizer.json (byte-level BPE, trained here), text.npy, held-out.npy and tasks-<length>.npy, uint16.
"""

from __future__ import annotations

import argparse
import hashlib
import html.parser
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import tasks

VOCABULARY = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own that a reader sees: a parser of tool calls finds them in the text."""
PACKAGES = {
    "libpython3.11-minimal=3.11.2-6+deb12u9": "69f41cfa3f4ba17284e538f843069d7529c53c207d2ae17a5b02785944870e33",
    "libpython3.11-stdlib=3.11.2-6+deb12u9": "10f13e000ee757f5f2d2d3569f9e30546214a0c850acd78695feae373bfa3e53",
    "libpython3.11-testsuite=3.11.2-6+deb12u9": "5dd0f85e950b344a51374e0ef68089e808f73c6c594c80e5232936b5c7ea4a28",
    "python3.11-doc=3.11.2-6+deb12u9": "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
    "python3-django=3:3.2.25-0+deb12u7": "9ad8ed29d9026207970777e194f658c39b3a7a96a932967f043503fc25bdc319",
    "python-django-doc=3:3.2.25-0+deb12u7": "87307f067916df72e17180d35b7cde5c7ea6080336cda518efd7f6e66988a7ca",
    "python3-networkx=2.8.8-1": "69888603d1b54696f5c3d02d05527628d2d18661d845109a62fe24aff241aa7b",
    "python3-pandas=1.5.3+dfsg-2": "4c530b36c107dcfdcbf2a2bef4008a4667b1833084259c0c40ef7d26b7fec0a5",
    "python3-sklearn=1.2.1+dfsg-1": "ca0c6be401d14871c7e93cfdd8d1f561595dc65e6e2ad2501d568aee7f7efc58",
    "python3-sqlalchemy=1.4.46+ds1-1": "141f3ed680b5de944c82aff900b1aeb4909a5d17ee0ddd3d697e250b5f765468",
    "python3-sympy=1.11.1-1": "b437232be31819aafd267ddf2132c16293ef75e02fd58b4ad31eee3ef1d5b49e",
    "libreoffice-help-en-us=4:7.4.7-1+deb12u14": "8faa840285734d6cfe1ed25537b48f07e74bd6412e3917bf8e5f8a653f7b3712",
    "libreoffice-help-tr=4:7.4.7-1+deb12u14": "8fe832104805b66d2dc5c153564bcc55b5a084e10b3c3a3ea773c4b57659bfb8",
}
"""Package=version: sha256. PSF-2.0 (Python), BSD-3-Clause, MIT (sqlalchemy), MPL-2.0 (LibreOffice's help)."""
LONGEST, SHORTEST = 400_000, 200  # characters of a document
HELD_OUT = 50  # every so many documents
SKIPPED = {"script", "style", "head", "svg", "button", "nav"}
SPACES = re.compile(r"\s+")
BLOCKS = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "h5", "dt", "dd", "pre", "br", "table", "section"}


class Words(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.depth = self.exact = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.depth += tag in SKIPPED
        self.exact += tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in SKIPPED and self.depth > 0
        self.exact -= tag == "pre" and self.exact > 0
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.parts.append(data if self.exact else SPACES.sub(" ", data))


def words(text: str) -> str:
    reader = Words()
    reader.feed(text)
    lines = (line.rstrip() for line in "".join(reader.parts).split("\n"))
    out: list[str] = []
    for line in lines:
        if line or (out and out[-1]):
            out.append(line)
    return "\n".join(out).strip()


def documents(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        if path.suffix not in {".py", ".html"} or not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if path.suffix == ".html":
            text = words(text)
        if SHORTEST <= len(text) <= LONGEST:
            yield text


def fetched(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for package, wanted in PACKAGES.items():
        name = package.partition("=")[0]
        paths = sorted(folder.glob(f"{name}_*.deb"))
        if not paths:
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
            paths = sorted(folder.glob(f"{name}_*.deb"))
        seen = hashlib.sha256(paths[0].read_bytes()).hexdigest()
        if seen != wanted:
            raise SystemExit(f"{paths[0]}: got sha256 {seen}, expected {wanted}: another version of the package")
        found.append(paths[0])
    return found


def trained_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in MARKUP])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--debs", type=Path, default=Path("debs"))
    parser.add_argument("--sequences", type=int, default=6000, help="of 2,048 tokens of made-up tasks")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    texts: list[str] = []
    for deb in fetched(arguments.debs):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg", "-x", str(deb), folder], check=True)
            own = list(documents(Path(folder)))
            texts += own
            print(f"{deb.name}: {len(own):,} documents, {sum(map(len, own)):,} characters", flush=True)
    chance = random.Random(20261124)
    path = out / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = trained_tokenizer(chance.sample(texts, len(texts) // 6) + tasks.samples(400))
        tokenizer.save(str(path))
    end = tokenizer.token_to_id(SPECIAL[0])
    held, kept = texts[::HELD_OUT], [text for i, text in enumerate(texts) if i % HELD_OUT]
    for name, some in (("held-out", held), ("text", kept)):
        ids: list[np.ndarray] = []
        for begin in range(0, len(some), 500):
            for one in tokenizer.encode_batch_fast(some[begin : begin + 500], add_special_tokens=False):
                ids.append(np.array([*one.ids, end], dtype=np.uint16))
        every = np.concatenate(ids)
        np.save(out / f"{name}.npy", every)
        print(f"{name}: {len(every):,} tokens of {sum(map(len, some)):,} characters", flush=True)

    def encode(parts: list[str]) -> list[list[int]]:
        return [one.ids for one in tokenizer.encode_batch_fast(parts, add_special_tokens=False)]

    for length, count in ((2048, arguments.sequences), (8192, arguments.sequences // 8)):
        made, wanted = tasks.sequences(encode, every, end, length, count)
        np.save(out / f"tasks-{length}.npy", made)
        np.save(out / f"answers-{length}.npy", np.packbits(wanted))
        print(f"tasks: {count:,} sequences of {length:,} tokens, {wanted.mean():.1%} of them are answers", flush=True)


if __name__ == "__main__":
    main()

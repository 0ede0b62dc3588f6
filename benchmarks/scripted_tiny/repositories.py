"""Write the repositories of a scripted model, in the layout of the real INT4 and FP8 pair, and pack them.

    .venv/bin/python -m benchmarks.scripted_tiny.repositories

writes pins/models/<name>.tar.xz of each form, whose SHA-256 stands in pins/models/<name>.yaml.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from pathlib import Path

from benchmarks.scripted_tiny.network import (
    FORMS,
    MAX_POSITIONS,
    TINY,
    Form,
    body_tensors,
    config,
    drafter_config,
    drafter_tensors,
    mtp_tensors,
)
from benchmarks.scripted_tiny.tokenizer import tokenizer_config, tokenizer_json
from benchmarks.scripted_tiny.vocabulary import END, PAD, vocabulary
from sparkpin.core.files import atomic_file, atomic_folder, write_json
from sparkpin.fetch.packed import Pair, as_bf16, write_shards

SEED = 20260101
INT4_REPO, FP8_REPO = TINY.int4_repo, TINY.fp8_repo


def generate(out_dir: Path, *, seed: int, form: Form = TINY) -> None:
    """Make ``out_dir/<repository>/`` for both repositories: the same bytes for a seed on every machine.

    The INT4 repository keeps shared experts in BF16 and its MTP tensors in a file that the index does not list; the
    FP8 repository holds the same network with every linear layer in FP8. Folders that are there are replaced. A drafter
    has one repository.
    """
    if form.drafts:
        shutil.rmtree(out_dir / form.bf16_repo, ignore_errors=True)
        generate_plain(out_dir / form.bf16_repo, seed=seed, form=form)
        return
    body, mtp = body_tensors(seed, vocabulary(), form), mtp_tensors(seed, form)
    Pair(config(vocabulary(), form), body, mtp, _write_texts).write(out_dir / form.int4_repo, out_dir / form.fp8_repo)


def generate_plain(folder: Path, *, seed: int, positions: int = MAX_POSITIONS, form: Form = TINY) -> None:
    """The same network in `folder`, all of it in BF16 with MTP, for a server that wants no quantised kernels; a
    drafter's is another one.

    positions: the longest sequence; nothing in the network depends on it.
    """
    if form.drafts:
        tensors, values = as_bf16(drafter_tensors(seed, vocabulary(), form)), drafter_config(vocabulary(), form)
    else:
        tensors = as_bf16(body_tensors(seed, vocabulary(), form) | mtp_tensors(seed, form))
        values = config(vocabulary(), form)
    with atomic_folder(folder) as made:
        write_json(made / "config.json", values | {"max_position_embeddings": positions})
        _write_texts(made)
        write_shards(made, tensors, form.layers)


def _write_texts(folder: Path) -> None:
    words = vocabulary()
    end, pad = words.id_of(END), words.id_of(PAD)
    # A request that names no temperature is greedy: vLLM takes its default from here.
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "temperature": 0.0}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer.json", tokenizer_json(words))
    write_json(folder / "tokenizer_config.json", tokenizer_config(words, max_length=MAX_POSITIONS))
    with atomic_file(folder / "chat_template.jinja") as file:
        file.write(Path(__file__).with_name("chat_template.jinja").read_bytes())


def packed(folder: Path) -> bytes:
    """The archive of the repositories below a folder. Small files come first, so that a config is read soon."""
    found = io.BytesIO()
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.stat().st_size, path))
    with tarfile.open(fileobj=found, mode="w:xz", preset=9) as archive:
        for path in files:
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(member, file)
    return found.getvalue()


def main() -> None:
    models = Path(__file__).resolve().parents[2] / "pins/models"
    for form in FORMS.values():
        with tempfile.TemporaryDirectory() as folder:
            generate(Path(folder), seed=SEED, form=form)
            (models / f"{form.name}.tar.xz").write_bytes(packed(Path(folder)))


if __name__ == "__main__":
    main()

"""Write the repositories of a scripted model, in the layout of the real INT4 and FP8 pair, and pack them.

    .venv/bin/python -m benchmarks.scripted_tiny.repositories

writes pins/models/<name>.tar.xz of each form, whose SHA-256 stands in pins/models/<name>.yaml.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.scripted_tiny.layout import BODY, GROUP, LAYER, Plain, fp8_parts, int4_parts, is_int4, write_repository
from benchmarks.scripted_tiny.network import (
    FORMS,
    MAX_POSITIONS,
    TINY,
    Form,
    as_bf16,
    body_tensors,
    config,
    drafter_config,
    drafter_tensors,
    mtp_tensors,
)
from benchmarks.scripted_tiny.tokenizer import tokenizer_config, tokenizer_json
from benchmarks.scripted_tiny.vocabulary import END, PAD, vocabulary
from benchmarks.scripted_tiny.weights import Weights, to_fp8, to_int4

SEED = 20260101
INT4_REPO, FP8_REPO = TINY.int4_repo, TINY.fp8_repo


def generate(out_dir: Path, *, seed: int, form: Form = TINY) -> None:
    """Make ``out_dir/<repository>/`` for both repositories: the same bytes for a seed on every machine.

    The INT4 repository keeps shared experts in BF16 and its MTP tensors in a file that the index does not list; the
    FP8 repository holds the same network with every linear layer in FP8. Folders that are there are replaced. A drafter
    has one repository.
    """
    if form.drafts:
        generate_plain(out_dir / form.bf16_repo, seed=seed, form=form)
        return
    body, mtp = body_tensors(seed, vocabulary(), form), mtp_tensors(seed, form)
    int4, fp8 = _int4(body), _fp8(body | mtp)
    for repo, tensors, quantization, extra in (
        (form.int4_repo, int4, int4_quantization(int4), as_bf16(mtp)),
        (form.fp8_repo, fp8, fp8_quantization(fp8), None),
    ):
        texts = _texts(config(vocabulary(), form) | {"quantization_config": quantization})
        write_repository(out_dir / repo, texts, tensors, form.layers, extra)


def _int4(tensors: Mapping[str, Weights | Plain]) -> dict[str, Plain]:
    found = dict[str, Plain]()
    for name, tensor in tensors.items():
        if isinstance(tensor, Weights) and is_int4(name):
            found |= int4_parts(name, tensor.rows, tensor.cols, *to_int4(tensor))
        else:
            found |= as_bf16({name: tensor})
    return found


def _fp8(tensors: Mapping[str, Weights | Plain]) -> dict[str, Plain]:
    found = dict[str, Plain]()
    for name, tensor in tensors.items():
        is_plain = isinstance(tensor, Plain)
        found |= {name: tensor} if is_plain else fp8_parts(name, tensor.rows, tensor.cols, *to_fp8(tensor))
    return found


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
    write_repository(folder, _texts(values | {"max_position_embeddings": positions}), tensors, form.layers)


def _texts(config: Mapping[str, Any]) -> dict[str, bytes]:
    words = vocabulary()
    end, pad = words.id_of(END), words.id_of(PAD)
    # A request that names no temperature is greedy: vLLM takes its default from here.
    values: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [end, pad], "pad_token_id": pad, "temperature": 0.0},
        "tokenizer.json": tokenizer_json(words),
        "tokenizer_config.json": tokenizer_config(words, max_length=MAX_POSITIONS),
    }
    texts = {name: json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) for name, value in values.items()}
    template = Path(__file__).with_name("chat_template.jinja").read_bytes()
    return {name: f"{text}\n".encode() for name, text in texts.items()} | {"chat_template.jinja": template}


def int4_quantization(tensors: Mapping[str, Plain], iters: int = 200) -> dict[str, Any]:
    """tensors: as written: a matrix that is still called `weight` stays in 16 bits; iters: of AutoRound's tuning."""
    ends = ("_proj.weight", "_a.weight", "_b.weight", "gate.weight")
    plain = [name.removesuffix(".weight") for name in tensors if LAYER.match(name) and name.endswith(ends)]
    return {
        "autoround_version": "0.12.0",
        "bits": 4,
        "block_name_to_quantize": f"{BODY}layers",
        "data_type": "int",
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in plain},
        "group_size": GROUP,
        "iters": iters,
        "low_gpu_mem_usage": True,
        "packing_format": "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": True,
    }


def fp8_quantization(tensors: Mapping[str, Plain]) -> dict[str, Any]:
    """tensors: as written."""
    plain = {name for name, tensor in tensors.items() if tensor.dtype != "F8_E4M3" and len(tensor.shape) > 1}
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(
            name.removesuffix(".weight") for name in plain if not name.endswith("_scale_inv")
        ),
        "quant_method": "fp8",
        "weight_block_size": [GROUP, GROUP],
    }


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

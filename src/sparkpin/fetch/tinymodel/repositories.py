"""Write the two repositories of a tiny model, in the layout of the real INT4 and FP8 pair."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.safetensors import TensorSource, write_file
from sparkpin.core.files import atomic_file, atomic_folder, git_blob_sha1, sha256_file, write_json
from sparkpin.fetch.tinymodel.network import (
    BODY,
    MAX_POSITIONS,
    TINY,
    Form,
    Plain,
    Tensors,
    body_tensors,
    config,
    drafter_config,
    drafter_tensors,
    mtp_tensors,
    plain_bf16,
)
from sparkpin.fetch.tinymodel.tokenizer import tokenizer_config, tokenizer_json
from sparkpin.fetch.tinymodel.vocabulary import END, PAD, vocabulary
from sparkpin.fetch.tinymodel.weights import GROUP

INT4_REPO, FP8_REPO = TINY.int4_repo, TINY.fp8_repo
EXTRA_FILE = "model_extra_tensors.safetensors"
INDEX_FILE = "model.safetensors.index.json"

INT4_AHEAD: Mapping[str, Any] = {"quantization_config": {"bits": 4, "group_size": GROUP}}
"""What is known of the INT4 repository's config before its tensors are."""

_SHARDS = 2
_METADATA = {"format": "pt"}
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")


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


@dataclass(frozen=True)
class Pair:
    """A model for both repositories. config: without a quantization_config; texts: writes the other files; iters: of
    AutoRound's tuning, 0 for rounding to the nearest."""

    config: Mapping[str, Any]
    body: Tensors
    mtp: Tensors
    texts: Callable[[Path], None]
    iters: int = 200

    def write(self, int4: Path, fp8: Path) -> None:
        """Folders that are there are replaced."""
        every = {**self.body, **self.mtp}
        for folder, quantization, tensors in (
            (int4, _int4_quantization(self.body, self.iters), _int4(self.body)),
            (fp8, _fp8_quantization(every), _fp8(every)),
        ):
            shutil.rmtree(folder, ignore_errors=True)
            with atomic_folder(folder) as made:
                write_json(made / "config.json", {**self.config, "quantization_config": quantization})
                self.texts(made)
                _write_shards(made, tensors, self.config["num_hidden_layers"])
                if folder == int4:
                    write_file(made / EXTRA_FILE, _sources(_bf16(self.mtp)), _METADATA)


def generate_plain(folder: Path, *, seed: int, positions: int = MAX_POSITIONS, form: Form = TINY) -> None:
    """The same network in `folder`, all of it in BF16 with MTP, for a server that wants no quantised kernels; a
    drafter's is another one.

    positions: the longest sequence; nothing in the network depends on it.
    """
    if form.drafts:
        tensors, values = _bf16(drafter_tensors(seed, vocabulary(), form)), drafter_config(vocabulary(), form)
    else:
        tensors = _bf16(body_tensors(seed, vocabulary(), form) | mtp_tensors(seed, form))
        values = config(vocabulary(), form)
    with atomic_folder(folder) as made:
        write_json(made / "config.json", values | {"max_position_embeddings": positions})
        _write_texts(made)
        _write_shards(made, tensors, form.layers)


def config_ahead(form: Form) -> dict[str, Any]:
    """config.json of the INT4 repository without the list of modules that stay in 16 bits; that of a drafter."""
    return drafter_config(vocabulary(), form) if form.drafts else {**config(vocabulary(), form), **INT4_AHEAD}


def files_of(folder: Path) -> Iterator[tuple[str, int, str, str]]:
    """What a Hub tells of a repository's files: name, size, SHA-256 of a large file, git's blob hash of another."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        large = path.suffix == ".safetensors"
        hashes = (sha256_file(path)[0], "") if large else ("", git_blob_sha1(path.read_bytes()))
        yield path.relative_to(folder).as_posix(), path.stat().st_size, *hashes


def commit_of(folder: Path) -> str:
    """40 hexadecimal digits that follow from the files, as a Hub's commit. git stores a pointer to a large file."""
    text = ""
    for name, size, sha256, blob in files_of(folder):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        text += f"{blob or git_blob_sha1(pointer.encode())} {name}\n"
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def is_int4(name: str) -> bool:
    """Whether AutoRound quantises this linear layer: attention and routed experts of the body."""
    return name.startswith(BODY) and ".shared_expert." not in name


def _int4(tensors: Tensors) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Plain):
            found[name] = tensor
        elif not is_int4(name):
            found[name] = plain_bf16(tensor)
        else:
            n, k, stem = tensor.rows, tensor.cols, name.removesuffix("weight")
            qweight, qzeros, scales = tensor.int4()
            found[f"{stem}qweight"] = Plain("I32", (k // 8, n), qweight)
            found[f"{stem}qzeros"] = Plain("I32", (k // GROUP, n // 8), qzeros)
            found[f"{stem}scales"] = Plain("F16", (k // GROUP, n), scales)
    return found


def _fp8(tensors: Tensors) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Plain):
            found[name] = tensor
        else:
            n, k = tensor.rows, tensor.cols
            weight, scale_inv = tensor.fp8()
            found[name] = Plain("F8_E4M3", (n, k), weight)
            found[f"{name}_scale_inv"] = Plain("BF16", (-(-n // GROUP), -(-k // GROUP)), scale_inv)
    return found


def _bf16(tensors: Tensors) -> dict[str, Plain]:
    return {name: t if isinstance(t, Plain) else plain_bf16(t) for name, t in tensors.items()}


def _int4_quantization(tensors: Tensors, iters: int) -> dict[str, Any]:
    ends = ("_proj.weight", "_a.weight", "_b.weight", "gate.weight")
    matrices = [name for name in tensors if _LAYER.match(name) and name.endswith(ends)]
    kept = [name for name in matrices if isinstance(tensors[name], Plain) or not is_int4(name)]
    return {
        "autoround_version": "0.12.0",
        "bits": 4,
        "block_name_to_quantize": f"{BODY}layers",
        "data_type": "int",
        "extra_config": {name.removesuffix(".weight"): {"bits": 16, "data_type": "float"} for name in kept},
        "group_size": GROUP,
        "iters": iters,
        "low_gpu_mem_usage": True,
        "packing_format": "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": True,
    }


def _fp8_quantization(tensors: Tensors) -> dict[str, Any]:
    kept = [name for name, tensor in tensors.items() if isinstance(tensor, Plain) and len(tensor.shape) > 1]
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in kept),
        "quant_method": "fp8",
        "weight_block_size": [GROUP, GROUP],
    }


def _write_texts(folder: Path) -> None:
    words = vocabulary()
    end, pad = words.id_of(END), words.id_of(PAD)
    # A request that names no temperature is greedy: vLLM takes its default from here.
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "temperature": 0.0}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer.json", tokenizer_json(words))
    write_json(folder / "tokenizer_config.json", tokenizer_config(words, max_length=MAX_POSITIONS))
    with atomic_file(folder / "chat_template.jinja") as file:
        file.write(resources.files(__package__).joinpath("chat_template.jinja").read_bytes())


def _write_shards(folder: Path, tensors: Mapping[str, Plain], layers: int) -> None:
    shards: list[dict[str, Plain]] = [{} for _ in range(_SHARDS)]
    for name, tensor in tensors.items():
        shards[_shard_of(name, layers)][name] = tensor
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{_SHARDS:05}.safetensors"
        write_file(folder / file, _sources(shard), _METADATA)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(len(tensor.data) for tensor in tensors.values())
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shard_of(name: str, layers: int) -> int:
    """Layers in order; what has no layer number (head, final norm, MTP) comes last, the embedding and `fc` first."""
    match = _LAYER.match(name)
    if match:
        return int(match[1]) * _SHARDS // layers
    return 0 if "embed_tokens" in name or name.startswith("fc.") else _SHARDS - 1


def _sources(tensors: Mapping[str, Plain]) -> Iterator[TensorSource]:
    for name, tensor in tensors.items():
        yield TensorSource(name, tensor.dtype, tensor.shape, (tensor.data,))

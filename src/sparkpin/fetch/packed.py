"""Models that the project holds: scripted ones as an archive of their repositories, a trained one in BF16.

An archive has every file of every repository (benchmarks/scripted_tiny makes it). BF16 weights are quantised here into
the real pair's two repositories, whose configs lie beside them. Each operation on a float32 number is one that IEEE 754
rounds correctly, and sums add in one order, so every machine makes the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkpin.checkpoint.from_gguf import SAFETENSORS, bf16
from sparkpin.checkpoint.repository import CONFIG
from sparkpin.checkpoint.repository import INDEX as INDEX_FILE
from sparkpin.checkpoint.safetensors import TensorSource, parse_header, write_file
from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import atomic_folder, git_blob_sha1, sha256_file, write_json
from sparkpin.core.paths import project_folder
from sparkpin.fetch.hub import Listed
from sparkpin.pins.schema import Packed, PinnedRepository

Floats = NDArray[np.float32]
TEXTS = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
LINEAR = re.compile(r"\.(\w+_proj|in_proj_qkv|in_proj_z)\.weight$")
STEPS = (7.0, 7.25, 7.5, 7.75, 8.0, 8.5, 9.0, 9.5, 10.0, 11.0)
"""A group's largest weight in INT4 steps, of which the one with the least error is taken. Beyond 7 or 8 it is cut."""
GROUP = 128
"""INT4 group and FP8 block size."""
FP8_MAX = 448.0
BODY = "model.language_model."
INT4_CONFIG, FP8_CONFIG = "config.int4.json", "config.fp8.json"
EXTRA_FILE = "model_extra_tensors.safetensors"
SHARDS = 2
LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")


class Plain(NamedTuple):
    """A tensor as a repository holds it, ready to write."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = Mapping[str, Plain]


def int4_tensors(name: str, raw: NDArray[np.uint16]) -> dict[str, Plain]:
    """A BF16 weight ``[N, K]``, both multiples of 128, in AutoRound's auto_gptq packing.

    qweight: I32 ``[K/8, N]``, eight nibbles along K, lowest first; qzeros: I32 ``[K/128, N/8]``, zero point minus one;
    scales: F16 ``[K/128, N]``. Value = (nibble - 8) * scale.
    """
    n, k = raw.shape
    groups = floats(raw).reshape(n, k // GROUP, GROUP)
    peak = np.abs(groups).max(axis=2)
    scales, codes, least = np.zeros_like(peak), np.zeros_like(groups), np.full_like(peak, np.inf)
    for step in STEPS:
        # As F16 holds it; its smallest number in place of 0, by which nothing can be divided.
        scale = np.maximum((peak / np.float32(step)).astype(np.float16), np.float16(2**-24)).astype(np.float32)
        code = np.clip(np.rint(groups / scale[..., None]), -8, 7)
        error = added(np.square(groups - code * scale[..., None]))
        better = error < least
        scales, least = np.where(better, scale, scales), np.where(better, error, least)
        codes = np.where(better[..., None], code, codes)
    eights = (codes + 8).astype(np.uint32).reshape(n, k // 8, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    words = np.bitwise_or.reduce(eights, axis=2).T.astype("<u4").tobytes()
    return int4_parts(name, n, k, words, scales.T.astype("<f2").tobytes())


def int4_parts(name: str, n: int, k: int, words: bytes, scales: bytes) -> dict[str, Plain]:
    """The tensors of such a weight."""
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": Plain("I32", (k // 8, n), words),
        f"{stem}qzeros": Plain("I32", (k // GROUP, n // 8), b"\x77" * (k // GROUP * n // 2)),
        f"{stem}scales": Plain("F16", (k // GROUP, n), scales),
    }


def fp8_tensors(name: str, raw: NDArray[np.uint16]) -> dict[str, Plain]:
    """A BF16 weight in E4M3, and BF16 scales of 128 x 128 blocks. Value = E4M3 * scale."""
    n, k = raw.shape
    blocks = floats(raw).reshape(n // GROUP, GROUP, k // GROUP, GROUP)
    stored = bf16(np.abs(blocks).max(axis=(1, 3)) / np.float32(FP8_MAX))
    scale = floats(stored)
    codes = e4m3(blocks / np.where(scale == 0, 1, scale).astype(np.float32)[:, None, :, None])
    return fp8_parts(name, n, k, codes.tobytes(), stored.tobytes())


def fp8_parts(name: str, n: int, k: int, weight: bytes, scales: bytes) -> dict[str, Plain]:
    """The tensors of such a weight; the last blocks may be smaller."""
    shape = (-(-n // GROUP), -(-k // GROUP))
    return {name: Plain("F8_E4M3", (n, k), weight), f"{name}_scale_inv": Plain("BF16", shape, scales)}


def floats(raw: NDArray[np.uint16]) -> Floats:
    """BF16 bits as numbers."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def added(values: Floats) -> Floats:
    """Sums over the last axis, a power of two long: halves onto halves, so that no machine adds in another order."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def e4m3(values: Floats) -> NDArray[np.uint8]:
    """The nearest E4M3 bytes, ties to the even one, saturating at 448."""
    exponent, mantissa = np.divmod(np.arange(0x7F), 8)  # the last code, 0x7F, is no number
    known = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9).astype(np.float32)
    above = (known[:-1] + known[1:]) / 2
    above[1::2] = np.nextafter(above[1::2], np.float32(0))  # a tie between an odd code and the next goes up
    codes = np.searchsorted(above, np.abs(values)).astype(np.uint8)
    return np.where(np.signbit(values), codes | np.uint8(0x80), codes)


def unpack(project: Path, packed: Packed, repositories: Mapping[str, PinnedRepository], out: Path) -> None:
    """Write the repositories of a pin below `out`, each in a folder of its Hub id. IntegrityError for bytes that are
    not the pinned ones."""
    path = path_of(project, packed)
    if path.suffix != ".xz":
        quantise(path, packed, out / repositories["int4"].repo, out / repositories["fp8"].repo)
        return
    with tarfile.open(fileobj=io.BytesIO(pinned(path, packed))) as archive:
        # Python 3.11.2, which Debian 12 has, knows no filter, nor an argument for one; the bytes are the pinned ones.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(out)


def config_ahead(project: Path, packed: Packed, repo: str) -> dict[str, Any] | None:
    """config.json of a repository before it is unpacked; of BF16 weights that of the INT4 one."""
    path = path_of(project, packed)
    if path.suffix != ".xz":
        return dict(json.loads((path / INT4_CONFIG).read_bytes()))
    with tarfile.open(fileobj=io.BytesIO(pinned(path, packed)), mode="r|xz") as archive:
        for member in archive:  # the small files are its first
            if member.name == f"{repo}/{CONFIG}" and (file := archive.extractfile(member)):
                return dict(json.load(file))
    return None


def path_of(project: Path, packed: Packed) -> Path:
    """In this checkout, where `project` is one that is laid out of a release's kept inputs: those hold no weights."""
    own = project / packed.path
    return own if own.exists() else project_folder() / packed.path


def pinned(path: Path, packed: Packed) -> bytes:
    """The bytes of a file whose hash the pin has."""
    data = path.read_bytes() if path.is_file() else b""
    if (got := hashlib.sha256(data).hexdigest()) != packed.sha256:
        cause = f"{path}: got SHA-256 {got} of {len(data)} bytes, expected {packed.sha256}"
        step = f"git restore {packed.path}; for new weights, set packed.sha256 in their pin"
        raise IntegrityError(cause, next_step=step)
    return data


def quantise(folder: Path, packed: Packed, int4: Path, fp8: Path) -> None:
    """Folders that are there are replaced."""
    data = pinned(folder / SAFETENSORS, packed)  # hashed before anything reads its tensors
    body, every, mtp = dict[str, Plain](), dict[str, Plain](), dict[str, Plain]()
    for name, info in parse_header(data, file_size=len(data), origin=str(folder)).tensors.items():
        plain = {name: Plain(info.dtype, info.shape, data[info.begin : info.end])}
        is_linear = LINEAR.search(name)  # of multiples of 128 both ways
        raw = np.frombuffer(plain[name].data, "<u2").reshape(info.shape) if is_linear else np.empty(0, "<u2")
        every |= fp8_tensors(name, raw) if is_linear else plain
        if name.startswith("mtp."):
            mtp |= plain
        else:
            body |= int4_tensors(name, raw) if is_linear and is_int4(name) else plain
    for target, config, tensors, extra in ((int4, INT4_CONFIG, body, mtp), (fp8, FP8_CONFIG, every, None)):
        texts = {text: (folder / text).read_bytes() for text in TEXTS} | {CONFIG: (folder / config).read_bytes()}
        write_repository(target, texts, tensors, json.loads(texts[CONFIG])["num_hidden_layers"], extra)


def write_repository(
    folder: Path, texts: Mapping[str, bytes], tensors: Tensors, layers: int, extra: Tensors | None = None
) -> None:
    """A folder that is there is replaced. extra: of the file that the index does not list."""
    shutil.rmtree(folder, ignore_errors=True)
    weight_map = dict[str, str]()
    with atomic_folder(folder) as partial:
        for name, data in texts.items():
            (partial / name).write_bytes(data)
        for number in range(SHARDS):
            shard = {name: tensor for name, tensor in tensors.items() if shard_of(name, layers) == number}
            file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
            write_tensors(partial / file, shard)
            weight_map |= dict.fromkeys(shard, file)
        total = sum(len(tensor.data) for tensor in tensors.values())
        write_json(partial / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        if extra:
            write_tensors(partial / EXTRA_FILE, extra)


def shard_of(name: str, layers: int) -> int:
    """Layers in order; what has no layer number (head, final norm, MTP) comes last, the embedding and `fc` first."""
    if match := LAYER.match(name):
        return int(match[1]) * SHARDS // layers
    return 0 if "embed_tokens" in name or name.startswith("fc.") else SHARDS - 1


def write_tensors(path: Path, tensors: Tensors) -> None:
    rows = (TensorSource(name, tensor.dtype, tensor.shape, (tensor.data,)) for name, tensor in tensors.items())
    write_file(path, rows, {"format": "pt"})


def is_int4(name: str) -> bool:
    """Whether AutoRound quantises this linear layer: attention and routed experts of the body."""
    return name.startswith(BODY) and ".shared_expert." not in name


def files_of(folder: Path) -> Iterator[Listed]:
    """What a Hub lists of a repository's files: SHA-256 of a large file, "" of another."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha256 = sha256_file(path)[0] if path.suffix == ".safetensors" else ""
        yield Listed(path.relative_to(folder).as_posix(), path.stat().st_size, sha256)


def commit_of(folder: Path) -> str:
    """40 hexadecimal digits that follow from the files, as a Hub's commit. git stores a pointer to a large file."""
    text = ""
    for name, size, sha256 in files_of(folder):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        text += f"{git_blob_sha1(pointer.encode() if sha256 else (folder / name).read_bytes())} {name}\n"
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

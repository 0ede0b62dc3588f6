"""Make what a CUDA machine without a network needs to run a real vLLM server with our mods, in one folder to carry.

usage: python benchmarks/stage_table/prepare.py OUT [--sm 90] [--ptx] [--heads 64 256] [--flash2]

The machine must have Python 3.12, torch for CUDA 13, Triton, transformers and what usually comes with them. Everything
else is installed into OUT/site.tar.xz: vLLM's own wheel without the machine code of other GPUs and without parts that a
text server does not load, the distributions of requires.txt, each with its hash there, the mods as built from mods/,
and a scripted model.
vLLM 0.33's libraries use torch's stable interface only, so they run on a torch that is older than the one it names.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import fatbin

say = partial(print, flush=True)  # its steps take minutes, also with a pipe behind it
HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
SCRIPTED = "scripted-tiny"
NEEDLES = (200, 1000, 6000, 36000)
MODS = ("modkit", "hybrid-int4-fp8", "turboquant", "int8-lm-head", "draft-vocabulary")
CARRIED = (
    "run.py", "backend.py", "table.py", "stages.py", "measure.py", "buckets.py", "filled.py", "randomly.py",
    "uniform.py",
)  # fmt: skip
MARLIN = (
    b"marlin_moe_wna166MarlinILl1125899906909960ELl1125899907892224EL",  # bfloat16, uint4 with a bias of 8
    b"marlin_moe_wna1613MarlinDefault",
    b"gptq_marlin_repack_kernel",
)
FLASH2 = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
WHOLE = re.compile(
    rb"\.entry _ZN5flash(16flash_fwd_kernelI\w*?ILi(64|256)E|(24|32)flash_fwd_splitkv_\w*?ILi64E)\w*?bfloat16_t"
)
"""Its loops over K and V, by head size, as PTX: there is no machine code for sm_90. For 64 those with pages and splits,
too, which the first and last layers of a dense model take beside `turboquant_*`."""
FLASH3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
LOOP = re.compile(
    rb"CollectiveMainloopFwdSm90ILi\d+EN4cute5tupleIJ\w*?EEENS6_IJ(\w*?)EEELi(64|128|256)ENS_(10bfloat16_t|6half_t)"
    rb"EfNS_4arch4Sm90E((?:Lb[01]E)+)"
)
"""A kernel's tile, head size of values, type and switches (causal, local, split, paged ...), in mangled names."""
TILES = {  # by head size: K of the tile, the size of values, in mangled names
    64: re.compile(rb"ILi64EEEEEELi64ENS\w*_(10bfloat16_t|6half_t)"),
    128: re.compile(rb"(?:ILi128EEE|S[AB]_)EEELi128ENS\w*_(10bfloat16_t|6half_t)"),  # S: what is named a second time
    256: re.compile(rb"ILi256EEEEEELi256ENS\w*_(10bfloat16_t|6half_t)"),
}
HEADS = (64, 256)  # of the scripted model and of the 122B; its DFlash drafter has 128
LEFT_OUT = (
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    FLASH2,
    "vllm/vllm-rs",
    "vllm/entrypoints/serve/instrumentator/static",
    "vllm/_qutlass_C.abi3.so",
    "vllm/_deepselect_C.abi3.so",
    "vllm/_flashkda_C.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_flashmla_extension_C.abi3.so",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to carry")
    parser.add_argument("--sm", type=int, default=90, help="architecture whose machine code is kept")
    parser.add_argument("--ptx", action="store_true", help="keep the PTX of INT4 experts (needs zstandard)")
    parser.add_argument("--heads", type=int, nargs="*", choices=TILES, default=HEADS, help="head sizes")
    parser.add_argument(
        "--flash2", action="store_true", help="FlashAttention 2, which vLLM's turboquant wants: OUT/flash2.tar.xz"
    )
    arguments = parser.parse_args()
    if (arguments.ptx or arguments.flash2) and find_spec("zstandard") is None:
        parser.error(
            "--ptx and --flash2 need zstandard: pip install --target FOLDER zstandard, and FOLDER on PYTHONPATH"
        )
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        install(site)
        say(f"leaving out machine code that is not for sm_{arguments.sm}; what is kept of each library:")
        if arguments.flash2:
            second_flash(site / FLASH2, out)
        for name in LEFT_OUT:
            path = site / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for library in sorted((site / "vllm").rglob("*.so")):
            data, kept = fatbin.slim(
                library.read_bytes(),
                arguments.sm,
                partial(needed_cubin, heads=arguments.heads),
                needed_ptx if arguments.ptx else lambda _: False,
            )
            library.write_bytes(data)
            if str(library.relative_to(site)) == FLASH3:
                check_flash(data, arguments.heads)
            say(f"  {library.relative_to(site)}: {fatbin.described(kept)}")
        size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 2**20
        say(f"compressing {size:.0f} MiB into {out / 'site.tar.xz'}, 2 to 6 minutes")
        with (
            lzma.open(out / "site.tar.xz", "wb", preset=6) as compressed,
            tarfile.open(mode="w", fileobj=compressed) as tar,
        ):
            tar.add(site, "site")
    say("making the scripted model and its checkpoints")
    scripted_model(out)
    shapes_and_chain(out)
    for name in CARRIED:
        shutil.copy(HERE / name, out / name)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20
    say(f"{size:.1f} MiB in {out}")


def needed_cubin(payload: bytes, heads: Iterable[int] = HEADS) -> bool:
    """Of FlashAttention's loops those for these head sizes: 64 and 256, as the two models have them.

    In bfloat16, and in float16, which is what 4-bit keys and values are expanded to.
    """
    if b"5flash" not in payload:
        return True
    if b"float_e4m3_t" in payload:
        return False
    return b"MainloopFwdSm90" not in payload or any(TILES[head].search(payload) for head in heads)


def check_flash(library: bytes, heads: Iterable[int] = HEADS) -> None:
    """The kernels for float16, which 4-bit K and V are expanded to, are those for bfloat16, and none of either is gone.

    Raises:
        RuntimeError: for a head size there are none, or other ones for one type than for the other.
    """
    found: dict[tuple[str, str], set[tuple[bytes, bytes]]] = {}
    cubins = (library[entry.begin : entry.end] for entry in fatbin.entries(library) if entry.kind == fatbin.CUBIN)
    for tile, head, kind, switches in (names for cubin in cubins for names in LOOP.findall(cubin)):
        found.setdefault((head.decode(), kind.decode()), set()).add((tile, switches))
    for head in heads:
        bfloat16, half = (found.get((str(head), kind), set()) for kind in ("10bfloat16_t", "6half_t"))
        if not bfloat16 or bfloat16 != half:
            raise RuntimeError(
                f"{FLASH3}, head size {head}: got {len(bfloat16)} kernels for bfloat16 and {len(half)} for float16, "
                "wanted the same ones of both: read the names in its cubins and mend TILES"
            )


def second_flash(library: Path, out: Path) -> None:
    """OUT/flash2.tar.xz, to be unpacked over the site. The driver compiles it: minutes, kept in CUDA_CACHE_PATH."""
    data, kept = fatbin.slim(library.read_bytes(), 0, ptx=lambda payload: bool(WHOLE.search(text_of(payload))))
    say(f"  {FLASH2}: {fatbin.described(kept)}")
    with tarfile.open(out / "flash2.tar.xz", "w:xz") as tar:
        info = tarfile.TarInfo(f"site/{FLASH2}")
        info.size, info.mode = len(data), 0o755
        tar.addfile(info, io.BytesIO(data))


def text_of(payload: bytes) -> bytes:
    import zstandard  # the wheel's PTX is compressed

    return zstandard.ZstdDecompressor().decompressobj().decompress(payload)


def needed_ptx(payload: bytes) -> bool:
    """What there is no machine code for: INT4 experts with bfloat16 activations, and what packs their weights."""
    text = text_of(payload)
    return any(name in text for name in MARLIN)


def scripted_model(out: Path) -> None:
    """OUT/model, and in OUT/cases.json what to ask it. A needle is a trigger, far behind which its script goes on."""
    sys.path[:0] = [str(PROJECT), str(PROJECT / "src")]
    from benchmarks.scripted_tiny.repositories import generate_plain
    from benchmarks.scripted_tiny.scripts import CHAT, COMPLETION, LONG
    from benchmarks.scripted_tiny.vocabulary import BLANK, trigger, vocabulary

    generate_plain(out / "model", seed=7, positions=65536)
    words = vocabulary()
    filler = words.chains[COMPLETION.mode]
    needles = {
        count: [
            words.id_of(trigger(LONG.mode)),
            *(filler[(i * i + count) % len(filler)] for i in range(count - 2)),
            words.id_of(BLANK),
        ]
        for count in NEEDLES
    }
    chats = {"hello": CHAT.text, "something long": LONG.text}
    cases = {"needles": needles, "content": LONG.content, "chats": chats}
    (out / "cases.json").write_text(json.dumps(cases))


def shapes_and_chain(out: Path) -> None:
    """Configs of the full shape, whose weights are made there; the scripted model's checkpoints of the chain."""
    from shapes import config, drafter

    from sparkpin.build.checkpoint import build_checkpoint
    from sparkpin.core.paths import Paths
    from sparkpin.pins import manifests
    from stages import scripted_checkpoints

    for name, made in {
        "int4": config(fp8=False),
        "fp8": config(fp8=True),
        "fp8-draft": config(fp8=True, fp8_draft=True),
        "drafter": drafter(PROJECT),
    }.items():
        (out / name).mkdir(exist_ok=True)
        (out / name / "config.json").write_text(json.dumps(made) + "\n")
    pin = manifests.load_model(PROJECT, SCRIPTED)
    lock = manifests.load_model_lock(PROJECT, pin)
    for name, steps in scripted_checkpoints().items():
        with tempfile.TemporaryDirectory() as work:
            paths = Paths(PROJECT, Path(work) / "cache", Path(work) / "home")
            shutil.copytree(build_checkpoint(paths, pin, lock, steps), out / name, dirs_exist_ok=True)
        path = out / name / "config.json"
        found = json.loads(path.read_text())
        path.write_text(json.dumps(found | {"max_position_embeddings": 65536}) + "\n")


def install(site: Path) -> None:
    """Everything for Python 3.12 on x86-64, without what the machine has."""
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    # Copies: links into uv's cache would be slimmed there, too, for everyone who installs this wheel later.
    command = [str(uv), "pip", "install", "--quiet", "--no-deps", "--link-mode", "copy", "--target", str(site)]
    command += ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35"]
    say("fetching and unpacking vLLM and what else requires.txt names, 0.4 GB unless uv has them in its cache")
    subprocess.run([*command, "--require-hashes", "-r", str(HERE / "requires.txt")], check=True)
    say(f"building our mods: {', '.join(MODS)}")
    subprocess.run([*command, *(str(PROJECT / "mods" / mod) for mod in MODS)], check=True)


if __name__ == "__main__":
    main()

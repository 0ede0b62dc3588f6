"""The backend's own code on a GPU, without a server: a mixed batch against float32, and prefill beside bfloat16's.

Runs in the folder that prepare.py made, with its site unpacked on PYTHONPATH. Prints each case; OUT/kernels.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import traceback
from pathlib import Path
from typing import Any

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("out", metavar="OUT", type=Path, help="a folder for kernels.json")
if __name__ == "__main__":
    PARSER.parse_args()  # the usage is told where there is no torch, too

import torch  # noqa: E402
from sparkpin_modkit.testing import single_process_vllm  # noqa: E402
from sparkpin_turboquant import naive, prefill  # noqa: E402
from sparkpin_turboquant.formats import FORMATS  # noqa: E402
from sparkpin_turboquant.tuned import piece_of  # noqa: E402

HEADS, KV_HEADS, D = 32, 2, 256
DEVICE = torch.device("cuda", 0)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).bfloat16()


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """`naive.attention` in pieces of 128 queries, which see what stands before them."""
    length, count = key.shape[0], query.shape[0]
    out = []
    for at in range(0, count, 128):
        seen = length - count + min(at + 128, count)
        out.append(naive.attention(query[at : at + 128], key[:seen], value[:seen], scale))
    return torch.cat(out)


class Layer:
    """An implementation as vLLM makes it, with a cache of its shape: blocks of 4608 tokens, in scattered order."""

    def __init__(self, name: str, blocks: int, block_size: int = 4608) -> None:
        from sparkpin_turboquant.common import vllm_slot_bytes
        from sparkpin_turboquant.gpu import GpuImpl

        self.impl = GpuImpl(HEADS, D, D**-0.5, KV_HEADS, kv_cache_dtype=name)
        self.block_size = block_size
        slot = vllm_slot_bytes(FORMATS[name], D)
        data = torch.randint(0, 255, (blocks, block_size, KV_HEADS, slot), dtype=torch.uint8, device=DEVICE)
        self.cache = data.transpose(1, 2)
        self.free = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()

    def take(self, length: int) -> torch.Tensor:
        row = [self.free.pop() for _ in range(-(-length // self.block_size))]
        return torch.tensor(row, dtype=torch.int32, device=DEVICE)

    def slots(self, row: torch.Tensor, first: int, last: int) -> torch.Tensor:
        place = torch.arange(first, last, device=DEVICE)
        return row[place // self.block_size].long() * self.block_size + place % self.block_size


ROUNDS = 16384
"""Tokens of history at a time, so that there are several rounds; a server's room for them is 131,072."""


def planned(starts: list[int], lengths: list[int], room: int = 0) -> prefill.Prefill:
    """As the metadata's builder plans for a server; room: another one."""
    from sparkpin_turboquant.gpu import _gpu

    tuned, piece = _gpu(DEVICE)[0], piece_of(HEADS // KV_HEADS)
    room = room or prefill.room_of(KV_HEADS, D)
    return prefill.plan(starts, lengths, DEVICE, room, tuned.few, piece, tuned.joined)


def mixed(name: str, room: int = 0) -> dict[str, Any]:
    """In one step: decode steps of three tokens, a first prefill, prefills after 20,000 and 40,000 cached tokens."""
    from sparkpin_turboquant.gpu import GpuMetadata

    layer = Layer(name, 40)
    lengths, new = [300, 9300, 900, 20500, 40000], [3, 3, 900, 500, 300]
    rows = [layer.take(length) for length in lengths]
    keys = [normal(n, KV_HEADS, D, seed=i) for i, n in enumerate(lengths)]
    values = [normal(n, KV_HEADS, D, seed=50 + i) for i, n in enumerate(lengths)]
    for key, value, row, length in zip(keys, values, rows, lengths, strict=True):
        layer.impl.do_kv_cache_update(None, key, value, layer.cache, layer.slots(row, 0, length))
    query = normal(sum(new), HEADS, D, seed=99)
    key, value = (torch.cat([x[-n:] for x, n in zip(all_, new, strict=True)]) for all_ in (keys, values))
    starts = [0]
    for n in new:
        starts.append(starts[-1] + n)
    table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32, device=DEVICE)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    step = GpuMetadata(
        lengths=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        table=table,
        decodes=2,
        decode_tokens=starts[2],
        most_queries=3,
        prefill=planned([s - starts[2] for s in starts[2:]], lengths[2:], room),
    )
    output = torch.full((sum(new), HEADS * D), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    layer.impl.forward(None, query, key, value, layer.cache, step, output)
    errors = []
    format = FORMATS[name]
    for i, length in enumerate(lengths):
        old = length - new[i] if i >= 2 else length  # prefill sees its own tokens as they are
        back = [
            torch.cat((naive.dequantise(*naive.quantise(x[:old], bits), bits), x[old:].float()))
            for x, bits in ((keys[i], format.key_bits), (values[i], 4))
        ]
        mine = slice(starts[i], starts[i + 1])
        wanted = reference(query[mine], *back, layer.impl.scale)
        got = output.view(-1, HEADS, D)[mine].float()
        errors.append(float((got - wanted).norm() / wanted.norm()))
    return {"errors": errors, "ok": max(errors) < 0.01}


def times(run: Any, repeat: int = 7) -> float:
    """Milliseconds, median."""
    run()
    found = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def speed(name: str, new: int, history: int) -> dict[str, Any]:
    """`new` tokens after `history`: ours, bfloat16's with the same FlashAttention, and the expansion alone, if any."""
    from sparkpin_turboquant.gpu import GpuMetadata

    layer = Layer(name, -(-(new + history) // 4608) + 1)
    length = new + history
    row = layer.take(length)
    key, value = normal(length, KV_HEADS, D, seed=1), normal(length, KV_HEADS, D, seed=2)
    layer.impl.do_kv_cache_update(None, key, value, layer.cache, layer.slots(row, 0, length))
    query = normal(new, HEADS, D, seed=3)
    out = torch.empty_like(query)
    starts = torch.tensor([0, new], dtype=torch.int32, device=DEVICE)
    all_ = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    plan = planned([0, new], [length])
    step = GpuMetadata(all_[1:], starts, row[None, :], 0, 0, 1, plan)
    space = prefill.Workspace.of(KV_HEADS, D, DEVICE)
    cache_, flash = layer.impl.cache(layer.cache), layer.impl.flash
    ours = times(lambda: layer.impl.forward(None, query, key[-new:], value[-new:], layer.cache, step, out))
    bf16 = times(lambda: flash(query, key, value, starts, all_, new, length, True, out))
    expand = times(lambda: [space.read(cache_, row[None, :], part.pieces) for part in plan.parts])
    return {"ours_ms": ours, "bf16_ms": bf16, "expand_ms": expand, "ratio": bf16 / ours}


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def case(name: str, run: Any) -> None:
        try:
            found[name] = run()
        except Exception:
            found[name] = {"ok": False, "error": traceback.format_exc()[-1500:]}
        print(name, found[name], flush=True)
        (out / "kernels.json").write_text(json.dumps(found, indent=1) + "\n")

    with single_process_vllm():
        for name in FORMATS:
            case(f"mixed {name}", lambda name=name: mixed(name))
            case(f"mixed {name}, rounds of {ROUNDS}", lambda name=name: mixed(name, ROUNDS))
        for new, history in ((2048, 8192), (2048, 32768), (2048, 131072), (8192, 131072), (64, 131072)):
            case(f"prefill {new} after {history}", lambda n=new, h=history: speed("turboquant_4bit_nc", n, h))
        case("prefill k8v4", lambda: speed("turboquant_k8v4", 2048, 131072))


if __name__ == "__main__":
    main(PARSER.parse_args().out)

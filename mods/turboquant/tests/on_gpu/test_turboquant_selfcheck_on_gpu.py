"""The self-check on a real GPU: sound kernels pass, each planted fault is seen. What it does not reach is below it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sparkpin_modkit import ModError
from sparkpin_modkit.selfcheck import timed
from sparkpin_modkit.testing import parse_reports
from sparkpin_turboquant import cuda, driver, gpu, history, kernel, naive, selfcheck
from sparkpin_turboquant.flash import flash_attention
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.tuned import tuned_for
from vllm.v1.attention.backends.fa_utils import is_fa_version_supported

sys.path.append(str(Path(__file__).parents[1]))

from faults import FAULTS, plant

GPU = torch.device("cuda", 0)
MAJOR, MINOR = torch.cuda.get_device_capability(GPU)
TUNED = tuned_for(10 * MAJOR + MINOR)
PROCESSORS = torch.cuda.get_device_properties(GPU).multi_processor_count
BLOCK = 1152


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Triton's, empty; nothing is loaded, and nothing stays so."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver.loaded.cache_clear()
    yield tmp_path
    torch.cuda.synchronize()
    driver.loaded.cache_clear()


def failing(case: selfcheck.Case, version: int | None = None) -> list[str]:
    """Kernels that differ, in the order of the table, which is printed. version: of FlashAttention."""
    flash = flash_attention(case.head_dim, case.head_dim**-0.5, version)
    found = list(timed(selfcheck.compare(case, TUNED, PROCESSORS, GPU, flash)))
    print("", *found, sep="\n")
    return [one.kernel for one in found if not one.is_right]


def case_of(
    name: str, head_dim: int, group: int = 16, dtype: str = "bfloat16", block_size: int = 1152
) -> selfcheck.Case:
    slot = FORMATS[name].slot_bytes(head_dim) + 2 * (name != "turboquant_k8v4")
    return selfcheck.Case(name, 2, group, head_dim, block_size, slot, (1, 2, 3, 4, 5), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"), [(256, 16, 1152), (256, 6, 8320), (128, 8, 128), (64, 1, 48)]
)
@pytest.mark.parametrize("name", FORMATS)
def test_sound_kernels_pass(name: str, head_dim: int, group: int, block_size: int, dtype: str) -> None:
    assert failing(case_of(name, head_dim, group, dtype, block_size)) == []


@pytest.mark.parametrize("version", [version for version in (2, 3) if is_fa_version_supported(version)])
def test_each_flash_attention_passes(version: int) -> None:
    """A Spark takes the second, which no other test here takes on Hopper."""
    assert failing(case_of("turboquant_4bit_nc", 256), version) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_where_it_is(cache: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(FAULTS[name], monkeypatch)
    assert failing(case_of(FAULTS[name].format, 256))[:1] == [FAULTS[name].kernel]


def test_a_server_s_first_start_compares_and_the_next_one_does_not(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And a fault stops it, each time, with the way on."""
    layer = SimpleNamespace(num_heads=32, num_kv_heads=2, head_size=256, format=FORMATS["turboquant_4bit_nc"])
    layer.flash = flash_attention(256, 256**-0.5)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    start = lambda: gpu.GpuImpl.check(layer, 1152, 262, config, (1, 3), GPU)  # noqa: E731
    start()
    start()
    first, again = (one for one in parse_reports("".join(capfd.readouterr())) if one["event"] == "checked")
    assert first["comparisons"] == 15 and first["worst"] < 1 and again["before"]
    assert len(list(cache.glob("checked-turboquant-*.json"))) == 1
    for kept in cache.glob("checked-*"):
        kept.unlink()
    driver.loaded.cache_clear()
    plant(FAULTS["second tile dropped"], monkeypatch)
    for _ in range(2):
        with pytest.raises(ModError, match=r"attend, merge, .*, 1 query tokens, differs .*SPARKPIN_MOD_TURBOQUANT=0"):
            start()
    assert not list(cache.glob("checked-*"))


# Of a case each: format, head size, multiprocessors, (cached tokens, queries) of each sequence.
PASSES = [
    (name, head_dim, processors, work)
    for name in FORMATS
    for head_dim in (64, 256)
    for processors in (1, 3, PROCESSORS)
    for work in ([(40_000, 3), (777, 1)], [(30_001, 1), (0, 0), (128, 3), (19_999, 2), (3, 3)], [(9000, 2)] * 40)
]


@pytest.mark.parametrize(("name", "head_dim", "processors", "work"), PASSES)
def test_blocks_that_pass_over_more_than_one_tile_and_sequence(
    name: str, head_dim: int, processors: int, work: list[tuple[int, int]]
) -> None:
    """Behind each sequence lie tokens of rejected drafts. The cache has more blocks, and they lie anywhere."""
    attended(name, head_dim, processors, work, blocks=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_beyond_2_gib(name: str) -> None:
    """With the sequences at its far end: offsets of 32 bits, signed or not, would be another's, or nobody's."""
    page = 2 * BLOCK * FORMATS[name].slot_bytes(256)
    attended(name, 256, 3, [(5000, 3), (3000, 1)], blocks=int(4.5 * 2**30) // page)


def attended(name: str, head_dim: int, processors: int, work: list[tuple[int, int]], blocks: int) -> None:
    """Store, expand and attend, in the last blocks of so many. blocks: 0 for twice as many as are used."""
    format, heads, group = FORMATS[name], 2, 4
    width, slot = -(-(max(length for length, _ in work) + 3) // BLOCK), format.slot_bytes(head_dim)
    used = width * len(work)
    blocks, page = blocks or 2 * used, heads * BLOCK * slot
    data = torch.full((blocks, page), 0x7E, dtype=torch.uint8, device=GPU)  # norms are NaN
    cache = cuda.Cache(data, format, heads, head_dim, BLOCK, slot, page)
    reference = naive.Blocks(data[-used:], format, heads, head_dim, BLOCK, slot)  # where offsets are small
    random = torch.Generator(GPU).manual_seed(1)
    table = (torch.randperm(used, generator=random, device=GPU) + blocks - used).view(len(work), width).int()
    back = []
    for i, (length, _) in enumerate(work):
        n = torch.arange(length + 3 * (length > 0), device=GPU)
        slots = table[i, n // BLOCK].long() * BLOCK + n % BLOCK
        rows = torch.randn(len(n), 2 * heads, head_dim, generator=random, device=GPU).bfloat16()
        rows[length:] *= 50  # of rejected drafts
        key, value = rows[:, :heads], rows[:, heads:]
        cuda.store_tokens(key, value, cache, slots)
        back.append(reference.read_rotated(slots[:length] - (blocks - used) * BLOCK))
        if length:
            for found, x, bits in zip(back[-1], (key, value), (format.key_bits, 4), strict=True):
                right = naive.dequantise_rotated(*naive.quantise(x[:length], bits), bits)
                assert float((found - right).norm() / right.norm()) < selfcheck.STORED, i
            plain = torch.full((2, heads, length, head_dim), torch.nan, dtype=torch.float16, device=GPU)
            history.expand_tokens(plain[0], plain[1], cache, table[i], 0, length)
            assert selfcheck.worst(plain, torch.stack(back[-1]).transpose(1, 2)) < selfcheck.ROUNDED, i
    many = [queries for _, queries in work]
    starts = torch.tensor([sum(many[:i]) for i in range(len(many) + 1)], dtype=torch.int32, device=GPU)
    lengths = torch.tensor([length for length, _ in work], dtype=torch.int32, device=GPU)
    query = torch.randn(sum(many), heads * group, head_dim, generator=random, device=GPU).bfloat16()
    out, scale = torch.full_like(query, torch.nan), head_dim**-0.5
    cuda.attend(query, cache, table, lengths, starts, max(many), scale, out, TUNED, processors)
    for i, (key, value) in enumerate(back):
        its = slice(int(starts[i]), int(starts[i + 1]))
        if its.start < its.stop:
            wanted = naive.unrotate(naive.attention(naive.rotate(query[its]), key, value, scale))
            assert selfcheck.worst(out[its], wanted) < selfcheck.ATTENDED, i


def test_offsets_of_32_bits_are_seen(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that only a cache beyond 2 GiB shows, in `store`: what it writes is not found, or lies nowhere."""
    source = kernel.Access.source
    narrow = lambda self: source(self).replace(  # noqa: E731
        "a.cache + block * a.at.block_bytes", "a.cache + (i64)(u32)((int)block * (int)a.at.block_bytes)"
    )
    assert narrow(kernel.Access(256, 4)) != source(kernel.Access(256, 4))
    monkeypatch.setattr(kernel.Access, "source", narrow)
    with pytest.raises(AssertionError):
        test_a_cache_beyond_2_gib("turboquant_4bit_nc")

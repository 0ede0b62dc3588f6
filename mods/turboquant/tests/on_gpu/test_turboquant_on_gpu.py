"""`driver` on a real GPU: it refuses what it must, and what it launches agrees with naive.py.

The self-check compares each kernel in many shapes: test_turboquant_selfcheck_on_gpu.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sparkpin_turboquant import cuda, driver, history, kernel, naive, prefill
from sparkpin_turboquant.formats import FORMATS, Format
from sparkpin_turboquant.tuned import tuned_for

GPU = torch.device("cuda", 0)
MAJOR, MINOR = torch.cuda.get_device_capability(GPU)
ARCHITECTURE = 10 * MAJOR + MINOR
PROCESSORS = torch.cuda.get_device_properties(GPU).multi_processor_count
HEADS, GROUP, BLOCK = 2, 4, 32
ACCESS = kernel.Access(64, 4)
everything = pytest.mark.parametrize(
    ("name", "head_dim"), [*((name, 256) for name in FORMATS), ("turboquant_4bit_nc", 128), ("turboquant_k8v4", 64)]
)


@pytest.fixture(scope="module", autouse=True)
def context() -> None:
    """The driver wants one, made with the first tensor: `driver.loaded` does, `driver.Loaded` does not."""
    torch.empty(1, device=GPU)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU)


def empty(format: Format, head_dim: int, blocks: int) -> cuda.Cache:
    """Its norms are NaN."""
    slot = format.slot_bytes(head_dim) + 2
    size = HEADS * BLOCK * slot
    data = torch.full((blocks, size + 48), 0x7E, dtype=torch.uint8, device=GPU)
    return cuda.Cache(data, format, HEADS, head_dim, BLOCK, slot, size + 48)


def as_naive(cache: cuda.Cache) -> naive.Blocks:
    data = cache.data[:, : HEADS * BLOCK * cache.slot]
    return naive.Blocks(data, cache.format, HEADS, cache.head_dim, BLOCK, cache.slot)


def filled(name: str, head_dim: int, length: int) -> tuple[cuda.Cache, torch.Tensor, torch.Tensor]:
    """A cache of one sequence, its blocks in any order, and its slots."""
    blocks = -(-length // BLOCK) + 1
    cache = empty(FORMATS[name], head_dim, blocks)
    table = torch.randperm(blocks, generator=torch.Generator(GPU).manual_seed(3), device=GPU).int()[None]
    n = torch.arange(length, device=GPU)
    slots = table[0, n // BLOCK].long() * BLOCK + n % BLOCK
    key, value = (normal(length, HEADS, head_dim, seed=seed).bfloat16() for seed in (1, 2))
    cuda.store_tokens(key, value, cache, slots)
    return cache, table, slots


def attend(
    cache: cuda.Cache, table: torch.Tensor, query: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
) -> None:
    """One sequence; may be captured in a graph."""
    starts = torch.arange(0, 2 * query.shape[0], query.shape[0], dtype=torch.int32, device=GPU)
    scale = cache.head_dim**-0.5
    cuda.attend(query, cache, table, lengths, starts, query.shape[0], scale, out, tuned_for(ARCHITECTURE), PROCESSORS)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def test_a_cubin_for_another_gpu_is_refused() -> None:
    other = 121 if ARCHITECTURE != 121 else 90
    refused = rf"CUDA_ERROR_(NO_BINARY_FOR_GPU|INVALID_IMAGE); it was to load cache\.cu for sm_{other}; expected a"
    with pytest.raises(RuntimeError, match=refused):
        driver.Loaded(ACCESS, kernel.compile_cubin(ACCESS, other))


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_\w+; it was to load cache\.cu for no GPU, as it is no cubin"):
        driver.Loaded(ACCESS, b"neither ELF nor PTX\0")


def test_a_function_that_a_cubin_lacks_is_an_error() -> None:
    cubin = kernel.compile_cubin(ACCESS, ARCHITECTURE)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_FOUND"):
        driver.Loaded(kernel.Variant(64, 4, 1, 2, 4), cubin)


def test_a_launch_beyond_the_gpu_is_an_error_and_the_next_one_works() -> None:
    loaded = driver.loaded(ACCESS, 0)
    launch = ACCESS.by_rows("turn", 1)
    for wrong in ({"threads": 2048}, {"shared_bytes": 10**7}):
        with pytest.raises(RuntimeError, match=r"CUDA_ERROR_\w+ to Launch\(function='turn'"):
            loaded.launch(launch._replace(**wrong), kernel.Turn(), 0)
    cache = empty(FORMATS["turboquant_4bit_nc"], 64, 1)
    query = normal(3, 2, 64, seed=4).half()
    assert error(history.turn(query, cache), naive.rotate(query)) < 1e-3


def test_loaded_once() -> None:
    assert driver.loaded(ACCESS, 0) is driver.loaded(dataclasses.replace(ACCESS), 0)


def test_queries_beyond_float16_are_held_and_nan_says_so() -> None:
    cache, table, slots = filled("turboquant_4bit_nc", 128, 40)
    lengths = torch.tensor([40], dtype=torch.int32, device=GPU)
    query = normal(2, HEADS * GROUP, 128, seed=5).bfloat16() * 1e7
    query[0, 3, 7] = torch.nan
    out, wanted = torch.zeros_like(query), naive.attend(query, as_naive(cache), slots, 128**-0.5)
    attend(cache, table, query, lengths, out)
    assert torch.equal(out.isnan(), wanted.isnan()) and int(out.isnan().any(-1).sum()) == 1
    turned, right = history.turn(query, cache), naive.rotate(query).clamp(-naive.FLOAT16_MAX, naive.FLOAT16_MAX)
    assert torch.equal(turned.isnan(), right.isnan())
    assert error(turned[~right.isnan()], right[~right.isnan()]) < 1e-3


def test_one_captured_graph_serves_other_lengths_on_another_stream() -> None:
    """The same bits as without a graph, each time; `merge` starts before `attend` has ended."""
    cache, table, _ = filled("turboquant_4bit_nc", 256, 3000)
    query = normal(3, HEADS * GROUP, 256, seed=6).bfloat16()
    lengths = torch.tensor([3000], dtype=torch.int32, device=GPU)
    static, plain = torch.empty_like(query), torch.empty_like(query)
    attend(cache, table, query, lengths, plain)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        attend(cache, table, query, lengths, static)
    for length in (3000, 3, 129, 2944, 3000):
        lengths.fill_(length)
        attend(cache, table, query, lengths, plain)
        for _ in range(20):
            static.fill_(torch.nan)
            graph.replay()
            assert torch.equal(static, plain), length


def flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for FlashAttention, which may not be there: causal, one request, in float32."""
    found = naive.attention(query, key, value, query.shape[2] ** -0.5)
    return found.to(query.dtype).contiguous(), found


@pytest.mark.parametrize(
    "overlap", [False, pytest.param(True, marks=pytest.mark.skipif(MAJOR < 9, reason="from SM90"))]
)
@everything
def test_new_tokens_and_history_at_once(name: str, head_dim: int, overlap: bool) -> None:
    """The history is expanded while the new tokens are rotated, into the same memory: no run differs from the first."""
    length, new = 3000, 70
    cache, table, slots = filled(name, head_dim, length)
    key, value = (normal(length, HEADS, head_dim, seed=seed).bfloat16() for seed in (1, 2))
    query = normal(new, HEADS * GROUP, head_dim, seed=5).bfloat16()
    plan = prefill.plan([0, new], [length], GPU, length, joined=new)
    old = length - new
    back = [
        torch.cat((old_part, naive.rotate(x[old:])))
        for old_part, x in zip(as_naive(cache).read_rotated(slots[:old]), (key, value), strict=True)
    ]
    wanted = naive.unrotate(naive.attention(naive.rotate(query), *back, head_dim**-0.5))
    first = None
    for _ in range(30):
        space = prefill.Workspace.of(HEADS, head_dim, GPU, length)
        space.key.fill_(torch.nan)
        space.value.fill_(torch.nan)
        out = torch.full_like(query, torch.nan)
        prefill.attend(query, key[old:], value[old:], cache, table, plan, space, flash, out, overlap)
        first = out if first is None else first
        assert torch.equal(out, first)
    assert error(first, wanted) < 3e-3

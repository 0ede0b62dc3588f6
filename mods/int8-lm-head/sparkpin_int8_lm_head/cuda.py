"""The GPU's INT8 matrix product: the kernels behind checked shapes, and their rehearsal while the model loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from sparkpin_modkit import ModError

from sparkpin_int8_lm_head import int4, naive
from sparkpin_int8_lm_head.kernel import launch_digits, launch_head, launch_int4
from sparkpin_int8_lm_head.tuned import Tuned, tile_for

DTYPES = (torch.bfloat16, torch.float16)
EDGE_ROWS, SPREAD_ROWS = 64, 1024
LARGEST_ERROR = 1e-3
"""Of rehearsed logits, relative norm. Fixed point comes to 5e-4 at worst (K = 3072: a column scale that leaves a token
one component); without the low digit it is 8.7e-3. Logits of 16 bits may have the rounding of their type beside it."""
FEW_TOKENS = 3
"""Fewer than the smallest tile holds, as in every draft: the rest of the tile is masked."""
FLOAT32_TOKENS = 1024
"""Up to so many tokens logits are not rounded to the model's type, which would make ties of what INT8 tells apart:
vLLM's samplers reckon in float32, whatever they are given. More come with prompt_logprobs only, where memory counts."""


def int8_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    tuned: Mapping[int, Tuned],
    out: torch.Tensor | None = None,
    *,
    float32: bool = True,
) -> torch.Tensor:
    """``naive.logits(x, q, row_scale, column_scale) + bias``. May be captured in a CUDA graph.

    Args:
        x: ``[B, K]`` bfloat16 or float16.
        q: ``[V, K]`` int8 from `layout.lay_out`.
        row_scale, column_scale, bias: ``[V]``, ``[K]`` and ``[V]``, any floating type.
        tuned: from `tuned.tuned_for`.
        out: ``[B, V]`` contiguous, to be written. A new tensor where it is None.
        float32: the new tensor's type, for up to FLOAT32_TOKENS tokens; else it is x's.

    Returns:
        ``out``.
    """
    if x.dtype not in DTYPES or x.dim() != 2 or x.shape[1] != q.shape[1]:
        raise ValueError(f"int8_linear: x {tuple(x.shape)} {x.dtype}, q {tuple(q.shape)}; expected [B, K] in 16 bits")
    tokens, rows = x.shape[0], q.shape[0]
    if out is None:
        dtype = torch.float32 if float32 and tokens <= FLOAT32_TOKENS else x.dtype
        out = torch.empty(tokens, rows, dtype=dtype, device=x.device)
    if tokens:
        digits, scale = digits_of(x, column_scale, q.stride(0))
        launch_head(out, digits, scale, q, row_scale, bias, tile_for(tokens, tuned))
    return out


def int4_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor | None,
    tuned: Mapping[int, Tuned],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``naive.logits(x, int4.unpack(packed, K), row_scale, column_scale)``. May be captured in a CUDA graph.

    Args:
        x: ``[B, K]`` bfloat16 or float16.
        packed, row_scale: ``[V, int4.half_of(K)]`` int8 in `int4.memory`, ``[V]`` float32.
        column_scale: ``[K]``, any floating type.
        tuned: from `tuned.tuned_for` for 4 bits.
        out: ``[B, V]`` float32, contiguous, to be written. A new tensor where it is None.

    Returns:
        ``out``.
    """
    if x.dtype not in DTYPES or x.dim() != 2 or packed.shape[1] != int4.half_of(x.shape[1]):
        wanted = "[B, K] in 16 bits and [V, half of K]"
        raise ValueError(f"int4_linear: x {tuple(x.shape)} {x.dtype}, packed {tuple(packed.shape)}; expected {wanted}")
    tokens = x.shape[0]
    if out is None:
        out = torch.empty(tokens, packed.shape[0], dtype=torch.float32, device=x.device)
    if tokens:
        digits, scale = digits_of(x, column_scale, 2 * packed.stride(0))
        launch_int4(out, digits, scale, packed, row_scale, tile_for(tokens, tuned))
    return out


def digits_of(x: torch.Tensor, column_scale: torch.Tensor | None, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[B, 2, width]`` int8 and ``[B]`` float32: `naive.digits`."""
    x = x.contiguous()
    if x.data_ptr() % 16:  # the kernels are compiled for memory that lies on 16 bytes
        x = x.clone()
    digits = torch.empty(x.shape[0], 2, width, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    launch_digits(digits, scale, x, column_scale)
    return digits, scale


def rehearse(
    q: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tuned: Mapping[int, Tuned],
    *,
    float32: bool = True,
) -> None:
    """Run each tile size on this head, so that no request compiles or loads a kernel, and check what comes out.

    Raises:
        ModError: some logits are not what naive.logits gives.
    """
    compared = compare(q, row_scale, column_scale, bias, dtype, tuned, float32=float32)
    _require(compared, tuned, "", "set SPARKPIN_MOD_INT8_LM_HEAD=0")


def rehearse_int4(
    packed: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    dtype: torch.dtype,
    tuned: Mapping[int, Tuned],
) -> None:
    """As `rehearse`, for rows of 4 bits.

    Raises:
        ModError: some logits are not what naive.logits gives.
    """
    compared = compare_int4(packed, row_scale, column_scale, dtype, tuned)
    _require(compared, tuned, "a drafter's rows of 4 bits: ", "leave draft_head out of --additional-config")


def compare(
    q: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tuned: Mapping[int, Tuned],
    *,
    float32: bool = True,
) -> Iterator[tuple[int, int, float, float]]:
    """Tokens, rows that were looked at, their error and its bound: each tile size of an INT8 head, one that is masked
    in part, and two tiles."""
    scale = torch.ones(q.shape[1], device=q.device) if column_scale is None else column_scale

    def product(x: torch.Tensor) -> torch.Tensor:
        return int8_linear(x, q, row_scale, column_scale, bias, tuned, float32=float32)

    def exact(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = naive.logits(x, q[rows], row_scale[rows].float(), scale)
        return logits if bias is None else logits + bias[rows].float()

    return _compare(product, exact, q, q.shape[1], dtype, tuned)


def compare_int4(
    packed: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    dtype: torch.dtype,
    tuned: Mapping[int, Tuned],
) -> Iterator[tuple[int, int, float, float]]:
    """As `compare`, for rows of 4 bits."""
    columns = column_scale.numel()

    def product(x: torch.Tensor) -> torch.Tensor:
        return int4_linear(x, packed, row_scale, column_scale, tuned)

    def exact(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return naive.logits(x, int4.unpack(packed[rows], columns), row_scale[rows], column_scale)

    return _compare(product, exact, packed, columns, dtype, tuned)


def _compare(
    product: Callable[[torch.Tensor], torch.Tensor],
    exact: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    q: torch.Tensor,
    columns: int,
    dtype: torch.dtype,
    tuned: Mapping[int, Tuned],
) -> Iterator[tuple[int, int, float, float]]:
    """`compare`, whatever the form of the codes `q`.

    Rows are the first and the last ones, and in between at least one of each tile, anywhere in it. product: tokens to
    their logits; exact: tokens and rows to the logits of these rows; columns: of a token.
    """
    generator = torch.Generator(device=q.device).manual_seed(0)
    last = q.shape[0] - 1
    ends = torch.arange(min(EDGE_ROWS, q.shape[0]), device=q.device)
    step = max(1, min(q.shape[0] // SPREAD_ROWS, *(entry.block_v for entry in tuned.values())))
    spread = torch.arange(0, q.shape[0], step, device=q.device)
    spread += torch.randint(step, spread.shape, generator=generator, device=q.device)
    rows = torch.cat([ends, last - ends, spread.clamp(max=last)]).unique()
    for tokens in (FEW_TOKENS, *tuned, max(tuned) + 1):
        x = torch.randn(tokens, columns, generator=generator, device=q.device).to(dtype)
        out, wanted = product(x), exact(x, rows)
        error = float((out[:, rows].float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
        largest = LARGEST_ERROR + (0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2)
        yield tokens, len(rows), error, largest


def _require(
    compared: Iterator[tuple[int, int, float, float]], tuned: Mapping[int, Tuned], what: str, off: str
) -> None:
    for tokens, count, error, largest in compared:
        if not error < largest:
            raise ModError(
                f"int8-lm-head: {what}for {tokens} tokens the kernel differs from the reference by {error:.3g} "
                f"(relative norm of {count} rows), expected less than {largest:.3g}, with {tile_for(tokens, tuned)}; "
                f"{off}, or serve the stage below (invoke rollback)"
            )

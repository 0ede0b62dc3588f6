"""Faults to plant in the kernels' source, and the kernel of the self-check's table that each shows in."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from sparkpin_turboquant import kernel


class Fault(NamedTuple):
    """compiled: whose source holds `before` once."""

    compiled: type
    before: str
    after: str
    kernel: str
    format: str = "turboquant_4bit_nc"


ALL = "for (int m = 0; m < MT; m++) for (int i = 0; i < 8; i++) s[m][i >> 2][i & 3]"
FAULTS = {
    "second tile dropped": Fault(
        kernel.Variant,
        (masking := "scale_and_mask(a, sequence, tile, norms, s, value_norm);"),
        f"{masking} if (tile == from + 1) {ALL} = -INFINITE;",
        "attend, merge",
    ),
    "next sequence's tokens": Fault(
        kernel.Variant, "a.owners[of.number] : of.number)", "a.owners[of.number] : of.number ^ 1)", "attend, merge"
    ),
    "owners not read": Fault(
        kernel.Variant, "a.owners ? a.owners[of.number] : of.number", "of.number", "attend, merge"
    ),
    "logits of 2 % more": Fault(
        kernel.Variant, "& 0xffff) * a.scale;", "& 0xffff) * a.scale * 1.02f;", "attend, merge"
    ),
    "a later token is seen": Fault(kernel.Variant, "token + j > end ||", "token + j > end + 1 ||", "attend, merge"),
    "a rejected token is seen": Fault(
        kernel.Variant,
        "if (token + j > end || token + j >= of.length)",
        "if (token + j > end + (end == of.length - 1))",
        "attend, merge",
    ),
    "last part not merged": Fault(kernel.Variant, "start <= last;", "start < last;", "attend, merge"),
    "key's norm 1 % larger": Fault(kernel.Access, "size / 127.f", "size / 125.7f", "store", "turboquant_k8v4"),
    "NaN that is no norm": Fault(kernel.Access, "b > a || b != b ? b : a", "fmaxf(a, b)", "store", "turboquant_k8v4"),
    "value's norm of the token before": Fault(
        kernel.Access, "[2 * place + is_value] = (u16)norm", "[2 * (place & ~is_value) + is_value] = (u16)norm", "store"
    ),
    "expanded with the next norm": Fault(kernel.Access, "min16(norms[j], MOST)", "min16(norms[j ^ 1], MOST)", "expand"),
    "expanded from the next block": Fault(kernel.Access, "a.row[index] *", "a.row[index ^ 1] *", "expand"),
    "turned without signs": Fault(
        kernel.Access,
        "x[j] = component(raw, j, a.bfloat) * a.signs[lane * E + j];",
        "x[j] = component(raw, j, a.bfloat);",
        "turn",
    ),
    "new tokens one place off": Fault(
        kernel.Access, "a.starts[request + 1] + token;", "a.starts[request + 1] + token - 1;", "turn"
    ),
    "folded without weights": Fault(kernel.Access, "old = expf(log - top)", "old = 1.f", "fold"),
}


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into what is compiled from now on."""
    source = fault.compiled.source

    def faulty(self: Any) -> str:
        text = str(source(self))
        assert text.count(fault.before) == 1, fault
        return text.replace(fault.before, fault.after)

    monkeypatch.setattr(fault.compiled, "source", faulty)

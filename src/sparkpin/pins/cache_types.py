"""Cache types that not every vLLM serves: names that patched ones knew, and those that need the mod `turboquant`.

No released vLLM takes the former: its parser would end the server at its start, so a recipe is refused before it is
built. The mod `turboquant` holds the same table (its formats.py); a test reads both.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparkpin.core.errors import ManifestError
from sparkpin.pins.schema import Stage

FLAG = "--kv-cache-dtype"
MOD, STAGE = "turboquant", "v2-tq"  # the stage that adds the mod
BETTER = {
    "turboquant35": (
        "turboquant_4bit_nc",
        "4 bits for keys and values: 3.5 were 4 for some channels, 3 for the others",
    ),
    "turboquant25": ("turboquant_3bit_nc", "3 bits for keys and values, the fewest there are"),
    "turboquant_asym": ("turboquant_k8v4", "8 bits for keys, 4 for values"),
    "turboquant_q8k_tq35v": ("turboquant_k8v4", "8 bits for keys, 4 for values"),
    "turboquant_q8k_tq25v": ("turboquant_k8v4", "8 bits for keys, 4 for values: there is none of fewer"),
}


def refuse_patched(value: str | None, file: object) -> None:
    """Raise ManifestError, with the better choice, when a recipe's cache type is one of a patched vLLM's.

    value: of the flag, None where it is not given.
    """
    if value in BETTER:
        name, meaning = BETTER[value]
        raise ManifestError(file, FLAG, value, f"{name} ({meaning}); no released vLLM knows this name")


def without_mod(value: str | None, chain: Sequence[Stage]) -> str:
    """What is wrong with a cache type in the image of the last stage; "" where that has the mod, or needs none.

    value: of the flag, None where it is not given.
    """
    needs = (value or "").startswith("turboquant_") and value not in BETTER
    if not needs or any(MOD in stage.mods for stage in chain):
        return ""
    return (
        f"{FLAG} {value}: the image of stage {chain[-1].name} has no mod {MOD}; without it a CPU serves wrong text or "
        "refuses, and on a GPU vLLM's own kernels take ten times as long and more, or do not start "
        "(mods/turboquant/README.md)"
    )

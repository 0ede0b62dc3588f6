"""Names of cache types that patched vLLMs knew, which recipes still say, and what to write in their place.

No released vLLM takes them: its parser would end the server at its start, so a recipe is refused before it is built.
The mod `turboquant` holds the same table (its formats.py); tests/test_recipes_cachetypes.py reads both.
"""

from __future__ import annotations

from sparkpin.errors import ManifestError

FLAG = "--kv-cache-dtype"
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

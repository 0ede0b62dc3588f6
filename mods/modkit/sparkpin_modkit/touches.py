"""What modkit itself uses of vLLM. Not checked at run time: `require_vllm` comes first, and reports can do without."""

from __future__ import annotations

from sparkpin_modkit.checks import Touches

TOUCHES: dict[str, Touches] = {
    release: {"vllm:__version__": None, "vllm.logger:init_logger": "name"}
    for release in ("0.19.1", "0.20.2", "0.32.0", "0.33.0")
}
REFUSED: dict[str, str] = {}

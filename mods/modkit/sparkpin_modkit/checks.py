"""Checks before anything in vLLM is replaced: the version, and the signature of what is replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from sparkpin_modkit.errors import SignatureChanged, UnsupportedVLLM


def require_vllm(versions: Sequence[str]) -> str:
    """Return the installed vLLM's release ("0.32.0" for "0.32.0+cpu"), which must be one of `versions`.

    Raises:
        UnsupportedVLLM: it is another one.
    """
    import vllm

    seen = str(vllm.__version__)
    release = seen.split("+", 1)[0]
    if release not in versions:
        raise UnsupportedVLLM(f"vLLM {seen} is installed, wanted one of: {', '.join(versions)}")
    return release


def check_signature(fn: Callable[..., Any], expected: str | Sequence[str]) -> None:
    """Check that `fn` takes exactly the parameters `expected`, by name and in order.

    Args:
        fn: function, method or class about to be replaced or called.
        expected: parameter names, as a list or as one string such as ``"self, layer, prefix"``; ``*args`` and
            ``**kwargs`` keep their stars, a bare ``*`` for keyword-only parameters is left out.

    Raises:
        SignatureChanged: the parameters differ, or cannot be read.
    """
    parts = expected.split(",") if isinstance(expected, str) else expected
    names = [part.strip() for part in parts if part.strip()]
    where = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise SignatureChanged(f"{where}: signature cannot be read ({error}), wanted ({', '.join(names)})") from error
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    seen = [stars.get(p.kind, "") + p.name for p in parameters]
    if seen != names:
        raise SignatureChanged(f"{where} takes ({', '.join(seen)}), wanted ({', '.join(names)})")

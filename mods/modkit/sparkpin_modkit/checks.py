"""Checks before anything in vLLM is replaced: its release, and all that the mod replaces, calls or reads there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sparkpin_modkit.errors import SignatureChanged, UnsupportedVLLM

Touches = Mapping[str, str | None]
"""What a mod touches in one release of vLLM: ``"module:Class.name"`` -> the parameters that it must take, or None for
what must merely be there (a class that is tested for or subclassed, a field). The project's
``tests/test_mods_vllm_source.py`` holds the same declaration against the source of each release."""


def require_vllm(versions: Sequence[str], refused: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the installed vLLM's release ("0.32.0" for "0.32.0+cpu"), which must be one of `versions`.

    Args:
        versions: those that the mod was written for.
        refused: release -> why the mod cannot work there, for the message.

    Raises:
        UnsupportedVLLM: it is another one.
    """
    import vllm

    seen = str(vllm.__version__)
    release = seen.split("+", 1)[0]
    if release not in versions:
        reason = f": {refused[release]}" if release in refused else ""
        raise UnsupportedVLLM(f"vLLM {seen} is installed, wanted one of: {', '.join(versions)}{reason}")
    return release


def check_vllm(touches: Mapping[str, Touches], refused: Mapping[str, str] = MappingProxyType({})) -> str:
    """Check that vLLM is a release of `touches` and holds all that is declared for it; returns the release.

    Raises:
        UnsupportedVLLM: see `require_vllm`.
        SignatureChanged: something is missing, or takes other parameters.
    """
    release = require_vllm(tuple(touches), refused)
    for name, parameters in touches[release].items():
        found = _find(name)
        if parameters is not None:
            check_signature(found, parameters)
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


def _find(name: str) -> Any:
    """What ``"module:Class.name"`` names; None for a field that the class only annotates."""
    module, _, qualified = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # vLLM has the module, but not what that imports
        raise SignatureChanged(f"vLLM has no {module}, wanted {name}") from error
    for part in qualified.split("."):
        if hasattr(found, part):
            found = getattr(found, part)
        elif any(part in vars(owner).get("__annotations__", {}) for owner in getattr(found, "__mro__", ())):
            return None
        else:
            raise SignatureChanged(f"vLLM's {module} has no {qualified}")
    return found

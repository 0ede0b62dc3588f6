"""Checks before anything in vLLM is replaced: its release, and all that the mod replaces, calls or reads there."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkpin_modkit import source
from sparkpin_modkit.errors import SignatureChanged, UnsupportedVLLM

Touches = Mapping[str, str | None]
"""What a mod touches in one release of vLLM: ``"module:Class.name"`` ->

- ``"self, layer"``: it is replaced, overridden, or counted on as it is, and takes exactly these parameters;
- ``"(self, layer, *, prefix)"``: it is only called, and must take this call: two arguments by place, one by name;
- None: it must merely be there (a class that is tested for or subclassed, a field).

The project's
``tests/test_mods_vllm_source.py`` holds the same declaration against the source of each release."""


def require_vllm(versions: Sequence[str]) -> str:
    """Return the installed vLLM's release ("0.32.0" for "0.32.0+cpu"), which must be one of `versions`.

    Args:
        versions: those that the mod was written for.

    Raises:
        UnsupportedVLLM: it is another one.
    """
    import vllm

    seen = str(vllm.__version__)
    release = seen.split("+", 1)[0]
    if release not in versions:
        raise UnsupportedVLLM(f"vLLM {seen} is installed, expected one of: {', '.join(versions)}")
    return release


def check_vllm(touches: Mapping[str, Touches]) -> str:
    """Check that vLLM is a release of `touches` and holds all that is declared for it; returns the release.

    A patch release (0.33.1) is taken for the one of `touches` that it patches, if it left the source of all that the
    mod replaces as it was.

    Raises:
        UnsupportedVLLM: see `require_vllm`.
        SignatureChanged: something is missing, takes other parameters, or was changed by a patch release.
    """
    release = _patched(touches) or require_vllm(tuple(touches))
    for name, parameters in touches[release].items():
        found = _find(name)
        if parameters is not None:
            (check_call if parameters.startswith("(") else check_signature)(found, parameters)
    return release


def _patched(touches: Mapping[str, Touches]) -> str | None:
    """The release of `touches` that the installed vLLM, itself none of them, is a patch of; None if there is none."""
    import vllm

    seen = str(vllm.__version__).partition("+")[0]
    near = [release for release in touches if release.rpartition(".")[0] == seen.rpartition(".")[0]]
    if seen in touches or not near or not re.fullmatch(r"\d+\.\d+\.\d+", seen):
        return None
    was, now = json.loads(source.READ.read_text())[near[-1]], source.Source(Path(inspect.getfile(vllm)).parents[1])
    replaced = [name for name, of in touches[near[-1]].items() if of is not None and not of.startswith("(")]
    hashes = {name: getattr(now.find(name), "sha256", None) for name in replaced}
    if changed := [name for name in replaced if hashes[name] is None or hashes[name] != was[name]["sha256"]]:
        raise SignatureChanged(
            f"vLLM {seen} is installed, whose code differs from {near[-1]}'s in {', '.join(changed)}; expected one of: "
            f"{', '.join(touches)}, or a patch of one that leaves these as they are"
        )
    return near[-1]


def check_call(fn: Callable[..., Any], call: str) -> None:
    """Check that `fn` can be called as ``"(self, layer, *, prefix)"`` says, and means the same by each place.

    It may take more parameters, which have defaults.

    Raises:
        SignatureChanged: it cannot, or its parameters cannot be read.
    """
    by_place, _, by_name = call.strip("()").partition("*")
    places, names = ([part.strip() for part in text.split(",") if part.strip()] for text in (by_place, by_name))
    where = f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
    try:
        bound = inspect.signature(fn).bind(*places, **dict.fromkeys(names))
    except (TypeError, ValueError) as error:
        raise SignatureChanged(f"{where} does not take the call {call}: {error}") from error
    if (seen := list(bound.arguments)[: len(places)]) != places:
        raise SignatureChanged(f"{where} takes ({', '.join(seen)}) by place, expected {call}")


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
        raise SignatureChanged(f"{where}: signature cannot be read ({error}), expected ({', '.join(names)})") from error
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    seen = [stars.get(p.kind, "") + p.name for p in parameters]
    if seen != names:
        raise SignatureChanged(f"{where} takes ({', '.join(seen)}), expected ({', '.join(names)})")


def _find(name: str) -> Any:
    """What ``"module:Class.name"`` names; None for a field that the class only annotates."""
    module, _, qualified = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # vLLM has the module, but not what that imports
        raise SignatureChanged(f"vLLM has no {module}, expected {name}") from error
    for part in qualified.split("."):
        if hasattr(found, part):
            found = getattr(found, part)
        elif any(part in vars(owner).get("__annotations__", {}) for owner in getattr(found, "__mro__", ())):
            return None
        else:
            raise SignatureChanged(f"vLLM's {module} has no {qualified}")
    return found

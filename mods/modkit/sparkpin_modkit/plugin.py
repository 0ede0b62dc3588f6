"""The body of every mod's ``register()``."""

from __future__ import annotations

from collections.abc import Callable

from sparkpin_modkit import ranks
from sparkpin_modkit.errors import EXIT_CODE
from sparkpin_modkit.reports import report, reporting_failure
from sparkpin_modkit.switch import enabled

_installed: set[str] = set()


def install_once(mod: str, version: str, install: Callable[[], None]) -> bool:
    """Run `install` once in this process, unless the mod is switched off.

    vLLM only logs a plugin that cannot be imported and serves without it, so mods keep their imports inside `install`.
    An exception there is reported and turned into ``SystemExit``: vLLM 0.32 lets any exception of a general plugin
    through, and ``SystemExit`` also passes an ``except Exception`` that a later vLLM may add.

    Returns:
        True when the mod is installed, now or by an earlier call.
    """
    if mod in _installed:
        return True
    try:
        with reporting_failure(mod, version=version):
            if not enabled(mod):
                report(mod, "off", version=version)
                ranks.take_part(mod, version, None)
                return False
            install()
            ranks.take_part(mod, version, install)
    except Exception as error:
        raise SystemExit(EXIT_CODE) from error
    _installed.add(mod)
    return True

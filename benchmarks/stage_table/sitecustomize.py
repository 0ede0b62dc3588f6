"""On the machine that serves: Triton's autotuners take their first configuration. For checks, not for speed.

vLLM tries dozens of tiles for each kernel of the linear attention when a server starts, a minute of compiling.
"""

from triton.runtime import autotuner

_init = autotuner.Autotuner.__init__


def _first_only(self, fn, arg_names, configs, *args, **kwargs):  # type: ignore[no-untyped-def]
    _init(self, fn, arg_names, configs[:1], *args, **kwargs)


autotuner.Autotuner.__init__ = _first_only

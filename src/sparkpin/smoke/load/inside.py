"""Runs in the image, under its own Python: load what vLLM would load, and say for each how that went.

Argument: JSON {"libraries": [paths], "imports": [modules], "group": "vllm.general_plugins"}. Each step prints a line
before it begins and one when it ends, so that a step which ends the process is known by name. Standard library only.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator

MARKER = "SPARKPIN_LOAD "
MODKIT = re.compile(r"sparkpin-modkit\b")  # which each mod of ours requires
REFUSAL = "UnsupportedPlatform"  # of sparkpin_modkit: a mod that has nothing for the platform it found
NO_GPU = re.compile(r"NVIDIA driver|no CUDA-capable device|No CUDA GPUs|CUDA_ERROR_NO_DEVICE|NVMLError|\bNVML\b")


class OtherCpu(OSError):
    """A library has instructions that this CPU has not."""


def tell(**row: object) -> None:
    print(MARKER + json.dumps(row), flush=True)


def step(kind: str, name: str, act: Callable[[], str], *, own: bool = False) -> None:
    """act: its text goes into the row. own: of a mod of ours."""
    tell(kind=kind, name=name, state="begin")
    begin = time.monotonic()
    try:
        state, detail = "ok", act()
    except BaseException as error:  # SystemExit is how a mod ends a server that must not go on without it
        state, detail = verdict(error, own=own)
    tell(kind=kind, name=name, state=state, detail=detail, seconds=round(time.monotonic() - begin, 2))


def verdict(error: BaseException, *, own: bool = False) -> tuple[str, str]:
    """ "refused" (no GPU, or a mod that has nothing for the platform found without), "unfit" (a library for another
    CPU) or "failed"; the first cause.

    own: of a mod of ours, which says itself that it refuses: any other error of it is one, whatever it talks about.
    """
    chain = list(causes(error))
    text = f"{type(chain[-1]).__name__}: {chain[-1]}"
    if isinstance(chain[-1], OtherCpu):
        return "unfit", str(chain[-1])
    wants = any(type(one).__name__ == REFUSAL or (not own and NO_GPU.search(str(one))) for one in chain)
    return ("refused" if wants else "failed"), " ".join(text.split())[:500]


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def apart(act: Callable[[], str]) -> str:
    """In a child process: libraries may be meant for different CPUs and define the same operators, and may crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            text, code = act(), 0
        except BaseException as error:
            text = " ".join(str(error).split())
        os.write(writing, text.encode("utf-8", "replace")[:4000])
        os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGILL:
        raise OtherCpu("it has instructions that this CPU has not (SIGILL)")
    if code < 0:
        raise OSError(f"its process ended by {signal.Signals(-code).name}")
    if code:
        raise OSError(text)
    return text


def load_library(path: str) -> str:
    """With all its symbols at once. Loading runs its initialisers, which register PyTorch's operators."""
    before = operators()
    ctypes.CDLL(path)
    came = operators() - before
    return f"{came} operators" if came else ""


def operators() -> int:
    """How many PyTorch knows; 0 where it does not tell."""
    listed = getattr(getattr(sys.modules.get("torch"), "_C", None), "_dispatch_get_all_op_names", None)
    return len(listed()) if listed else 0


def imported(name: str) -> str:
    module = importlib.import_module(name)
    return str(getattr(module, "__version__", ""))


def platform() -> str:
    current_platform = importlib.import_module("vllm.platforms").current_platform
    return f"{type(current_platform).__name__}, device {current_platform.device_type!r}"


def plugins(group: str) -> None:
    for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda entry: entry.name):

        def register(entry: importlib.metadata.EntryPoint = entry) -> str:
            entry.load()()
            return f"{entry.value} of {entry.dist.name} {entry.dist.version}" if entry.dist else entry.value

        step("plugin", mod_of(entry), register, own=is_own(entry))


def is_own(entry: importlib.metadata.EntryPoint) -> bool:
    return any(MODKIT.match(row) for row in (entry.dist.requires if entry.dist else None) or ())


def mod_of(entry: importlib.metadata.EntryPoint) -> str:
    """Our mods' modules say their names; they import nothing heavy until they are called."""
    try:
        return str(getattr(importlib.import_module(entry.module), "MOD", entry.name))
    except BaseException:  # the step that loads it will say why
        return entry.name


def main(text: str) -> None:
    wanted = json.loads(text)
    step("import", "torch", functools.partial(imported, "torch"))
    for path in wanted["libraries"]:
        step("library", path, functools.partial(apart, functools.partial(load_library, path)))
    for name in wanted["imports"]:
        step("import", name, functools.partial(imported, name))
    step("platform", "vllm.platforms", platform)
    plugins(wanted["group"])
    tell(kind="end", name="", state="ok")


def run(text: str) -> int:
    """`main` in a child process; its exit status. qemu ends a program that crashed by a signal to itself, which does
    nothing to a container's first process: that would wait for ever."""
    child = os.fork()
    if not child:
        main(text)
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))

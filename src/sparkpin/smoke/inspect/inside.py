"""Runs in the image, under its own Python: print what the image holds, then load what vLLM would load.

Argument: JSON, `Wanted` of `smoke.inspect.run`. Each step prints a line before it begins and one when it ends, so that
a step which ends the process is known by name. Standard library only, but for pip, which lies beside this file.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import glob
import importlib
import importlib.metadata
import io
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

MARKER = "SPARKPIN_INSPECT "
MODKIT = re.compile(r"sparkpin-modkit\b")  # which each mod of ours requires
REFUSAL = "UnsupportedPlatform"  # of sparkpin_modkit: a mod that has nothing for the platform it found
NO_GPU = re.compile(r"NVIDIA driver|no CUDA-capable device|No CUDA GPUs|CUDA_ERROR_NO_DEVICE|NVMLError|\bNVML\b")
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
NOT_FOUND = re.compile(r"(\S+): cannot open shared object file")
CODE = re.compile(r"\.sm_(\w+)\.(cubin|ptx)$", re.M)  # in the names that cuobjdump lists


class ChildError(Exception):
    """What a step did in a process of its own. Arguments: the state that it comes to, and the text."""


def tell(**row: object) -> None:
    print(MARKER + json.dumps(row), flush=True)


def step(kind: str, name: str, act: Callable[[], Any], *, ours: bool = False) -> Any:
    """act: its value goes into the row, and is returned; None where it failed. ours: of a mod of ours."""
    tell(kind=kind, name=name, state="begin")
    begin, value = time.monotonic(), None
    try:
        value = act()
        state, detail = "ok", value
    except BaseException as error:  # SystemExit is how a mod ends a server that must not go on without it
        state, detail = verdict(error, ours=ours)
    tell(kind=kind, name=name, state=state, detail=detail, seconds=round(time.monotonic() - begin, 2))
    return value


def verdict(error: BaseException, *, ours: bool = False) -> tuple[str, str]:
    """ "refused" (no GPU, or a mod that has nothing for the platform found without), "unfit" (a library for another
    CPU), "crashed" or "failed"; the first cause.

    ours: of a mod of ours, which says itself that it refuses: any other error of it is one, whatever it talks about.
    """
    chain = [error]
    while cause := chain[-1].__cause__:
        chain.append(cause)
    if isinstance(chain[-1], ChildError):
        state, text = chain[-1].args
        return state, text
    wants = any(type(one).__name__ == REFUSAL or (not ours and NO_GPU.search(str(one))) for one in chain)
    return ("refused" if wants else "failed"), " ".join(f"{type(chain[-1]).__name__}: {chain[-1]}".split())[:500]


def apart(act: Callable[[], Any]) -> Any:
    """In a child process: libraries may be meant for different CPUs and define the same operators, and may crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            value, code = act(), 0
        except BaseException as error:
            value = " ".join(str(error).split())[:4000]
        with open(writing, "w") as pipe:
            json.dump(value, pipe)
        os._exit(code)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGILL:
        raise ChildError("unfit", "it has instructions that this CPU does not (SIGILL)")
    if code < 0:
        raise ChildError("crashed", f"its process ended by {signal.Signals(-code).name}")
    if code:
        raise ChildError("failed", json.loads(text))
    return json.loads(text)


def mapped() -> set[str]:
    """The shared objects in this process."""
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}


def load_library(path: str, places: dict[str, str]) -> list[str]:
    """Loads it as an import does, with all its symbols; its initialisers register PyTorch's operators. Returns what
    came into memory.

    places: file names -> paths of libraries that are loaded first where the loader does not find them, as a package's
    Python code does.
    """
    there = mapped()
    dlopen(path, dict(places))
    return sorted(mapped() - there)


def dlopen(path: str, places: dict[str, str]) -> None:
    while True:
        try:
            ctypes.CDLL(path)
            return
        except OSError as error:
            lacking = NOT_FOUND.match(str(error))
            if not lacking:
                raise
            if lacking[1] not in places:
                others = [f"; {name}: cannot open shared object file" for name in lacks(path, places) - {lacking[1]}]
                raise OSError(f"{error}{''.join(sorted(others))}") from None
            dlopen(places.pop(lacking[1]), places)


def lacks(path: str, places: dict[str, str]) -> set[str]:
    """All libraries that the loader does not find for one, of which it names the first alone."""
    listed = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    return set(re.findall(r"(\S+) => not found", listed)) - places.keys() - {os.path.basename(one) for one in mapped()}


def machine_of(path: str) -> int:
    """The field e_machine of an ELF file, 0 for any other."""
    with open(path, "rb") as file:
        head = file.read(20)
    return int.from_bytes(head[18:], "little") if head[:4] == b"\x7fELF" else 0


def found_libraries(sites: Iterable[str]) -> dict[str, int]:
    """Paths of the shared objects below Python's packages, with their machines; vLLM's first."""
    found = {}
    for site in sites:
        for folder, _, names in os.walk(site):
            for path in (f"{folder}/{name}" for name in names if ".so" in name):
                if not os.path.islink(path) and (machine := machine_of(path)):
                    found[path] = machine
    return dict(sorted(found.items(), key=lambda row: ("-packages/vllm/" not in row[0], row[0])))


def load_all(found: dict[str, int]) -> None:
    """What came with another library that loaded is not loaded again, vLLM's own excepted."""
    machine, linked = machine_of(os.path.realpath(sys.executable)), mapped()
    places = {os.path.basename(path): path for path in found}
    for path, its in found.items():
        of_vllm = "-packages/vllm/" in path
        if its != machine and not of_vllm:
            tell(kind="library", name=path, state="foreign", detail=f"e_machine {its}")
        elif of_vllm or path not in linked:
            act = functools.partial(load_library, path, {} if of_vllm else places)
            linked.update(step("library", path, functools.partial(apart, act)) or ())


def gpu_code(sites: Iterable[str], libraries: Iterable[str]) -> dict[str, dict[str, int] | str]:
    """Of each library with code for GPUs how many pieces are for which ("sm_120a", "compute_80" for PTX), as Triton's
    cuobjdump lists them, or why it does not. It shows no "f" of a cubin (sm_120f), which loads where one without
    does."""
    tool = next((path for site in sites for path in glob.glob(f"{site}/triton/backends/nvidia/bin/cuobjdump")), None)
    found: dict[str, dict[str, int] | str] = {}
    for path in libraries:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.rfind(b".nv_fatbin") < 0:  # section names stand at a file's end
                continue
        if tool is None:
            found[path] = "no Triton with its cuobjdump is in the image to list it"
            continue
        done = subprocess.run([tool, "-lelf", "-lptx", path], capture_output=True, text=True)
        names = [f"{'sm' if kind == 'cubin' else 'compute'}_{arch}" for arch, kind in CODE.findall(done.stdout)]
        if names:
            found[path] = dict(collections.Counter(names))
        elif "does not contain device code" not in done.stdout + done.stderr:
            found[path] = f"cuobjdump does not list it: {done.stderr.strip()}"
    return found


def packages() -> list[dict[str, Any]]:
    """The distributions, with the mods whose GPU kernels each can compile."""
    return [
        {
            "name": one.metadata["Name"],
            "version": one.version,
            "site": str(one.locate_file("")),
            "kernels": [entry.name for entry in one.entry_points if entry.group == "sparkpin.kernels"],
        }
        for one in importlib.metadata.distributions()
    ]


def kernels_ahead(folder: str) -> dict[str, dict[str, Any]]:
    """Of each mod with kernels in the image how many there are, and the list that the build wrote of them."""
    found = {}
    for mod in os.listdir(folder) if os.path.isdir(folder) else ():
        there = len(glob.glob(f"{folder}/{mod}/**/*.cubin", recursive=True))
        found[mod] = {"there": there, "listed": 0, "sm": "", "triton": ""}
        with contextlib.suppress(FileNotFoundError), open(f"{folder}/{mod}/kernels.json") as file:
            listed = json.load(file)
            found[mod] |= {"listed": len(listed["kernels"]), "sm": listed["sm"], "triton": listed["triton"]}
    return found


def pip_check() -> list[str]:
    """What pip has to say of the distributions."""
    pip, out = importlib.import_module("pip._internal.cli.main"), io.StringIO()
    with contextlib.redirect_stdout(out):
        code = pip.main(["check"])
    return out.getvalue().splitlines() if code else []


def stand_in(sites: Iterable[str]) -> int:
    """Put a library into memory that has every function of NVIDIA's driver, of which each says that there is no device.
    Returns how many; none where the image has no header of the driver."""
    headers = [path for site in sites for path in glob.glob(f"{site}/nvidia/*/include/cuda.h")]
    if not headers:
        return 0
    with open(headers[0]) as file:
        names = sorted(set(re.findall(r"\bcu[A-Z]\w*", file.read())))
    folder = tempfile.mkdtemp()
    with open(f"{folder}/driver.c", "w") as file:
        file.writelines(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names)
    library = f"{folder}/libcuda.so.1"
    argv = ["gcc", "-w", "-shared", "-nostdlib", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, file.name]
    subprocess.run(argv, check=True)
    ctypes.CDLL(library)  # who needs libcuda.so.1 from now on finds it in memory, by its soname
    shutil.rmtree(folder)
    return len(names)


def imported(name: str) -> str:
    module = importlib.import_module(name)
    return str(getattr(module, "__version__", ""))


def torch_facts() -> dict[str, str]:
    torch: Any = importlib.import_module("torch")
    return {"version": torch.__version__, "cuda": torch.version.cuda or ""}


def platform() -> str:
    current_platform = importlib.import_module("vllm.platforms").current_platform
    return f"{type(current_platform).__name__}, device {current_platform.device_type!r}"


def plugins(group: str) -> None:
    for entry in sorted(importlib.metadata.entry_points(group=group), key=lambda entry: entry.name):

        def register(entry: importlib.metadata.EntryPoint = entry) -> str:
            entry.load()()
            return f"{entry.value} of {entry.dist.name} {entry.dist.version}" if entry.dist else entry.value

        ours = any(MODKIT.match(row) for row in (entry.dist.requires if entry.dist else None) or ())
        step("plugin", mod_of(entry), register, ours=ours)


def mod_of(entry: importlib.metadata.EntryPoint) -> str:
    """Our mods' modules say their names; they import nothing heavy until they are called."""
    try:
        return str(getattr(importlib.import_module(entry.module), "MOD", entry.name))
    except BaseException:  # the step that loads it will say why
        return entry.name


def main(wanted: dict[str, Any]) -> None:
    sites = [os.path.realpath(path) for path in sys.path if path.endswith("-packages") and os.path.isdir(path)]
    step("fact", "packages", packages)
    step("fact", "pip", functools.partial(apart, pip_check))
    step("fact", "kernels", functools.partial(kernels_ahead, wanted["kernels"]))
    found = step("fact", "libraries", functools.partial(found_libraries, sites)) or {}
    if wanted["gpu"]:
        step("fact", "gpu", functools.partial(gpu_code, sites, found))
    step("fact", "driver", functools.partial(stand_in, sites))
    step("fact", "torch", torch_facts)
    load_all(found)
    for name in wanted["imports"]:
        step("import", name, functools.partial(imported, name))
    step("platform", "vllm.platforms", platform)
    plugins(wanted["plugins"])
    tell(kind="end", name="", state="ok")


def run(text: str) -> int:
    """`main` in a child process; its exit status. qemu ends a program that crashed by a signal to itself, which does
    nothing to a container's first process: that would wait for ever."""
    child = os.fork()
    if not child:
        main(json.loads(text))
        return 0
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))

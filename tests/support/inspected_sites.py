"""A folder of Python packages with real libraries, compiled here, and what the inspection's script prints of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkpin.core.paths import Paths
from sparkpin.smoke.inspect.facts import ImageFacts
from sparkpin.smoke.inspect.run import ASKED, mounted

MACHINES = {"x86_64": 62, "aarch64": 183}
HERE = MACHINES[os.uname().machine]
OTHER = ({*MACHINES.values()} - {HERE}).pop()
SERVER = {
    "torch/__init__.py": "from torch import version\n__version__ = '2.14.0'\n",
    "torch/version.py": "cuda = '13.0'\n",
    "vllm/__init__.py": "__version__ = '0.33.0'\n",
    "vllm/_custom_ops.py": "",
    "vllm/platforms.py": "class None_: device_type = ''\ncurrent_platform = None_()\n",
}


def distribution(name: str, version: str, entry_points: str = "", requires: Sequence[str] = ()) -> dict[str, str]:
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{folder}/entry_points.txt": entry_points,
    }


def put(site: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return site


def server(folder: Path) -> Path:
    """Stand-ins for torch and vLLM, of the few names that the script asks for."""
    named = distribution("vllm", "0.33.0") | distribution("torch", "2.14.0")
    return put(folder / "site-packages", SERVER | named)


def library(
    path: Path, source: str = "int here;", needs: Sequence[Path] = (), soname: str = "", versions: str = ""
) -> Path:
    """A shared object of this C, which finds others in its own folder. needs: those that it is linked against;
    versions: a version script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = [f"-Wl,-soname,{soname}"] if soname else []
    if versions:
        script = path.with_suffix(".map")
        script.write_text(versions)
        options.append(f"-Wl,--version-script,{script}")
    argv = ["gcc", "-w", "-shared", "-nostdlib", "-fPIC", *options, "-o", path, "-x", "c", "-", "-x", "none"]
    argv += ["-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", *needs]
    subprocess.run(argv, input=source.encode(), check=True)
    return path


def for_another_machine(path: Path) -> Path:
    data = bytearray(library(path).read_bytes())
    data[18:20] = OTHER.to_bytes(2, "little")
    path.write_bytes(data)
    return path


def facts_of(site: Path, work: Path) -> ImageFacts:
    """By the script as a container gets it, under a Python that has only what lies in `site`."""
    asked = json.dumps(ASKED | {"gpu": False, "kernels": str(site / "none")})
    with mounted(Paths(work / "project", work / "cache", work / "home"), emulated=False) as volumes:
        argv = [sys.executable, "-S", f"{next(iter(volumes))}/inside.py", asked]
        done = subprocess.run(argv, env={"PYTHONPATH": str(site), "PATH": os.environ["PATH"]}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return ImageFacts.read(done.stdout, "exited with 0")

"""Runs inside a build step, as build.py: make a wheel from source, without a network, in the builder's own Python.

usage: build.py SOURCE WHEELS  SOURCE holds build.json and the folders archives, patches and debs; WHEELS gets the wheel
                               and requirements.txt, its name==version with its hash

Debian packages that only the build needs are unpacked, not installed: none of them is in an image.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

VENV = Path("/opt/vllm")
BUILD = Path("/build")  # the same folder each time: compilers write paths down
CCACHE = Path("/tmp/ccache")
EPOCH = "1767225600"  # sparkpin.epoch.EPOCH
JOB_MEMORY = 8 << 30  # bytes; nvcc takes 4 to 8 GB for one of vLLM's files
CONTROL_GROUPS = (  # folder, limit, use, pages of files in memory.stat that count as used
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
HOOK = """\
import importlib, sys
sys.path[:0] = sys.argv[3:]
importlib.import_module(sys.argv[1]).build_wheel(sys.argv[2])
"""


def jobs(free: int, cpus: int) -> int:
    """How many compilers may run at once: the memory is what ends first."""
    return max(1, min(cpus, free // JOB_MEMORY))


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this step may still take: of the machine, and of its control group where that has less."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    found = [next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))]
    for folder, limit, usage, pages in CONTROL_GROUPS:
        most = number(root / folder / limit, -1)
        if most >= 0:
            stat = root / folder / "memory.stat"
            rows = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
            used = number(root / folder / usage, 0) - int(rows.get(pages, 0))  # those are given back when others want
            found.append(max(0, most - max(0, used)))
    return min(found)


def number(path: Path, other: int) -> int:
    """What the file says; other: where there is none, or none is set ("max")."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else other


def unpack_debs(folder: Path) -> None:
    """Over the root file system, whose /bin and /lib are links into /usr and stay so."""
    for deb in sorted(folder.glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as data:
            subprocess.run(["tar", "-x", "--keep-directory-symlink", "-C", "/"], stdin=data.stdout, check=True)
        if data.returncode:
            sys.exit(f"{deb.name}: dpkg-deb ended with {data.returncode}")


def unpack(archive: Path, target: Path) -> Path:
    """The folder that the archive's files are in: its only one, or `target` itself."""
    target.mkdir(parents=True)
    with tarfile.open(archive) as tar:  # of the bytes that the lock names
        # As Python 3.11 does it: from 3.14 on the default refuses links that repositories have. It is no argument,
        # which Debian's 3.11 does not take.
        tar.extraction_filter = lambda member, path: member
        tar.extractall(target)
    found = list(target.iterdir())
    # A source distribution: a lock takes no other form of it, and a repository's archive is a plain .tar.
    only = archive.name.endswith(".tar.gz") and len(found) == 1 and found[0].is_dir()
    return found[0] if only else target


def apply_patches(source: Path, patches: list[Path]) -> None:
    """In order, each only if all of it fits. Ends the build with the hunks that do not."""
    # Inside of somebody's checkout, git would look for the files from its top and skip what it does not find there.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(source.parent.resolve()), "GIT_CONFIG_GLOBAL": "/dev/null"}

    def git_apply(patch: Path, *options: str) -> subprocess.CompletedProcess[str]:
        argv = ["git", "apply", *options, str(patch.resolve())]
        return subprocess.run(argv, cwd=source, env=env, capture_output=True, text=True, check=False)

    for patch in patches:
        checked = git_apply(patch, "--check")
        if checked.returncode:
            before = set(source.rglob("*.rej"))
            git_apply(patch, "--reject")
            rejected = "".join(path.read_text() for path in sorted(set(source.rglob("*.rej")) - before))
            sys.exit(f"{patch.name} does not fit the source:\n{checked.stderr}{rejected}")
        git_apply(patch).check_returncode()
        print(f"applied {patch.name}", flush=True)


def stub_driver(path: Path) -> None:
    """An empty library under the driver's name, to link against: the driver itself comes with the container."""
    if not path.exists():
        argv = ["g++", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", path, "-x", "c++", "/dev/null"]
        subprocess.run(argv, check=True)


def environment(plan: dict[str, Any], inputs: dict[str, Path]) -> dict[str, str]:
    """Nothing of the machine's, and the number of jobs, which changes no byte."""
    number = jobs(free_memory(), len(os.sched_getaffinity(0)))
    print(f"{number} jobs, {free_memory() / 1e9:.1f} GB of memory free", flush=True)
    folders = [str(VENV / "bin"), *plan["path"], "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    return {
        "PATH": ":".join(folders),
        "HOME": str(BUILD),
        "LC_ALL": "C.UTF-8",
        "VIRTUAL_ENV": str(VENV),
        "SOURCE_DATE_EPOCH": EPOCH,
        "PYTHONHASHSEED": "0",
        "CCACHE_DIR": str(CCACHE),
        "CCACHE_COMPILERCHECK": "content",
        "MAX_JOBS": str(number),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(number),
        **plan["env"],
        **{variable: str(path) for variable, path in inputs.items()},
    }


def build_wheel(source: Path, wheels: Path, env: dict[str, str]) -> Path:
    """By the source's own PEP 517 backend, from what is installed: nothing is looked up or fetched."""
    system = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]
    backend = system.get("build-backend", "setuptools.build_meta").partition(":")[0]
    extra = [str(source / folder) for folder in system.get("backend-path", [])]
    wheels.mkdir()
    argv = [VENV / "bin/python", "-c", HOOK, backend, wheels, *extra]
    done = subprocess.run(argv, cwd=source, env=env, check=False)
    found = list(wheels.glob("*.whl"))
    if done.returncode or len(found) != 1:
        sys.exit(f"{backend} ended with {done.returncode} and made {len(found)} wheels")
    return found[0]


def require(plan: dict[str, Any], wheel: Path) -> str:
    """name==version of the wheel, which is what the stack says; a build may add +cu130 to its version."""
    name, version = wheel.name.split("-")[:2]
    if name.replace("_", "-").lower() != plan["name"] or version.partition("+")[0] != plan["version"].partition("+")[0]:
        sys.exit(f"saw {name} {version}, wanted {plan['name']} {plan['version']}")
    return f"{plan['name']}=={version}"


def main(given: Path, wheels: Path) -> None:
    plan = json.loads((given / "build.json").read_text())
    unpack_debs(given / "debs")
    shutil.rmtree(BUILD, ignore_errors=True)
    source = unpack(given / "archives" / plan["archive"], BUILD / plan["name"])
    inputs = {
        entry["variable"]: unpack(given / "archives" / entry["archive"], BUILD / "inputs" / name) / entry["folder"]
        for name, entry in plan["inputs"].items()
    }
    apply_patches(source, [given / "patches" / name for name in plan["patches"]])
    if plan["driver"]:
        stub_driver(Path(plan["driver"]))
    env = environment(plan, inputs)
    ccache = shutil.which("ccache")
    if ccache:
        subprocess.run([ccache, "--quiet", "--zero-stats"], env=env, stdout=subprocess.DEVNULL, check=False)
    wheel = build_wheel(source, wheels, env)
    line = f"{require(plan, wheel)} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (wheels / "requirements.txt").write_text(line)
    if ccache:
        subprocess.run([ccache, "--show-stats"], env=env, check=False)


if __name__ == "__main__":
    os.umask(0o022)
    main(*map(Path, sys.argv[1:]))

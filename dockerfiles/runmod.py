"""Runs inside a build step: run the run.sh of a community mod on what is below, and collect what it changed.

usage: runmod.py NAME MOD LAYER   MOD has the mod's files in a folder `files`, or mod.zip, or mod.tar; LAYER gets each
                                  file that came or changed, and deletion marks for those that went

The mod finds what it knows from spark-vllm-docker: itself in /workspace/mods/NAME, WORKSPACE_DIR, the site-packages
under the path that they have there. It has no network. The build ends when run.sh fails, when a patch does not fit
(whatever run.sh makes of that), when its output speaks of skipping, and when nothing changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

MARK = ".wh."  # OCI image specification, "Whiteouts"
VENV = Path("/opt/vllm")
WORKSPACE = Path("/workspace")
FOREIGN = Path("/usr/local/lib/python3.12/dist-packages")  # where the community's images have their packages
NOT_OURS = {Path(name) for name in ("/proc", "/sys", "/dev", "/run", "/tmp", "/layer", "/etc/hosts", "/etc/hostname")}
NOT_OURS.add(Path("/etc/resolv.conf"))
SKIPS = re.compile(r"\bskip(s|ped|ping)?\b", re.I)
LAST = 40  # lines of output in an error
State = dict[Path, tuple[object, ...]]


def states(root: Path) -> State:
    """What would show that a path has changed. Deletion marks of the trees below are carried out on the way."""
    found: State = {}
    for folder, names, files in os.walk(root):
        here = Path(folder)
        names[:] = sorted(name for name in names if here / name not in NOT_OURS)
        for name in [*names, *files]:
            path = here / name
            if name.startswith(MARK):
                remove(here / name.removeprefix(MARK))
                path.unlink()
                continue
            if path in NOT_OURS:
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:  # a mark that came later took it
                continue
            seen = (status.st_mode, status.st_uid, status.st_gid)
            if not stat.S_ISDIR(status.st_mode):
                seen += (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            found[path] = seen
    return {path: seen for path, seen in found.items() if os.path.lexists(path)}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def unpack(given: Path, target: Path) -> Path:
    """The folder with run.sh: the top, or the only folder in it."""
    if (given / "mod.zip").exists():
        with zipfile.ZipFile(given / "mod.zip") as archive:
            archive.extractall(target)
    elif (given / "mod.tar").exists():
        with tarfile.open(given / "mod.tar") as tar:  # of the bytes that the lock names
            tar.extraction_filter = lambda member, path: member
            tar.extractall(target)
    else:
        shutil.copytree(given / "files", target, dirs_exist_ok=True)
    inside = [path for path in target.iterdir() if path.is_dir()]
    top = target if (target / "run.sh").is_file() or len(inside) != 1 else inside[0]
    if not (top / "run.sh").is_file():
        sys.exit("the mod has no run.sh")
    return top


def shims(folder: Path) -> None:
    script = Path(__file__).with_name("patching.py")
    for name in ("patch", "git"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" {name} "$@"\n')
        (folder / name).chmod(0o755)


def run(top: Path, site: Path, scratch: Path) -> tuple[int, str]:
    """run.sh's exit status and all that it wrote, which is shown as it comes."""
    (scratch / "bin").mkdir()
    shims(scratch / "bin")
    (top / "run.sh").chmod(0o755)
    env = {
        "PATH": f"{scratch / 'bin'}:{VENV / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LC_ALL": "C.UTF-8",
        "VIRTUAL_ENV": str(VENV),
        "WORKSPACE_DIR": str(WORKSPACE),
        "PYTHON_ROOT": str(site),
        "VLLM_SITE_PACKAGES": str(site),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "RUNMOD_RECORD": str(scratch / "record"),
    }
    output = []
    with subprocess.Popen(
        ["./run.sh"], cwd=top, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line)
    return process.returncode, "".join(output)


def faults(code: int, output: str, rows: list[dict[str, object]]) -> list[str]:
    """Why the mod is not to be taken for applied."""
    applied = {str(name) for row in rows if row["kind"] == "applied" for name in list_of(row["files"])}
    found = [f"a patch does not fit:\n{row['text']}" for row in rows if row["kind"] == "failed"]
    for row in rows:
        # A script may ask for one patch and, told no, take another for the same file.
        if row["kind"] == "refused" and not applied.intersection(map(str, list_of(row["files"]))):
            found.append(f"a patch was tried, does not fit, and no other took its place:\n{row['text']}")
    if code:
        found.append(f"run.sh ended with {code} (a build has no network):\n{last(output)}")
    elif lines := [line for line in output.splitlines() if SKIPS.search(line)]:
        found.append(f"it skipped something: {lines[0].strip()}")
    return found


def list_of(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def last(output: str) -> str:
    return "\n".join(output.splitlines()[-LAST:])


def collect(before: State, after: State, layer: Path) -> list[Path]:
    """Copy what came or changed into the layer, mark what went; the paths, those that went included."""
    changed = [path for path, seen in after.items() if before.get(path) != seen]
    for path in sorted(changed):
        target = layer / path.relative_to("/")
        make_parents(path, layer)
        if path.is_dir() and not path.is_symlink():
            target.mkdir(exist_ok=True)
            shutil.copystat(path, target)
        else:
            shutil.copy2(path, target, follow_symlinks=False)
    gone = [path for path in before if path not in after]
    for path in gone:
        if path.parent in after:
            make_parents(path, layer)
            (layer / path.parent.relative_to("/") / f"{MARK}{path.name}").touch()
    return [path for path in changed if not path.is_dir() or path.is_symlink()] + gone


def make_parents(path: Path, layer: Path) -> None:
    """As they are in the image: a layer's folder has a mode of its own."""
    for folder in reversed(path.parents):
        target = layer / folder.relative_to("/")
        if not target.exists():
            target.mkdir()
            shutil.copystat(folder, target)


def refresh_bytecode(changed: list[Path], layer: Path) -> None:
    """Bytecode of the images is checked against nothing: that of a changed file would go on running as it was."""
    import importlib.util

    from install import compile_file

    for path in changed:
        if path.suffix != ".py" or VENV not in path.parents:
            continue
        cached = Path(importlib.util.cache_from_source(str(path)))
        if (layer / path.relative_to("/")).is_file():
            compile_file(str(layer), layer / path.relative_to("/"))
        elif cached.exists():
            make_parents(cached, layer)
            (layer / cached.parent.relative_to("/") / f"{MARK}{cached.name}").touch()


def main(name: str, given: Path, layer: Path) -> None:
    (site,) = VENV.glob("lib/python3*/site-packages")
    before = states(Path("/"))
    with tempfile.TemporaryDirectory(prefix="runmod-") as work:
        scratch = Path(work)
        own = WORKSPACE / "mods" / name
        own.parent.mkdir(parents=True)
        link = not FOREIGN.exists()
        made = [folder for folder in FOREIGN.parents if not folder.exists()]
        if link:
            FOREIGN.parent.mkdir(parents=True, exist_ok=True)
            FOREIGN.symlink_to(site)
        shutil.copytree(unpack(given, scratch / "unpacked"), own, symlinks=True)
        code, output = run(own, site, scratch)
        record = scratch / "record"
        rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        if found := faults(code, output, rows):
            sys.exit(f"community mod {name}: " + "\n".join(found))
        if link:
            FOREIGN.unlink()
            for folder in made:
                folder.rmdir()
        shutil.rmtree(WORKSPACE / "mods")
    layer.mkdir()
    if WORKSPACE not in before and not any(WORKSPACE.iterdir()):
        WORKSPACE.rmdir()
    changed = collect(before, states(Path("/")), layer)
    if not changed:
        sys.exit(f"community mod {name}: run.sh changed nothing")
    refresh_bytecode(changed, layer)
    for path in changed:
        print(f"changed {path}", flush=True)


if __name__ == "__main__":
    os.umask(0o022)
    main(sys.argv[1], *map(Path, sys.argv[2:]))

"""A stand-in for vLLM's source: a distribution with a C++ extension, which a real compiler builds in a second.

It takes headers of torch from the wheel that it will run with, and those of a library from a repository that its own
build would clone, as vLLM's does.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import tiny_images
import yaml
from wheelhouse import make_wheel

from sparkpin.build import render
from sparkpin.core.paths import Paths
from sparkpin.fetch.source_archives import trees
from sparkpin.pins import manifests
from sparkpin.pins.schema import LockedFile, SourceLock, Stack, StackLock

BACKEND = '''\
"""PEP 517, as small as it goes: two units, through ccache where there is one, as vLLM's own build does."""
import base64, hashlib, os, shutil, subprocess, sysconfig, zipfile
import torch

def build_wheel(folder, config_settings=None, metadata_directory=None):
    include = [sysconfig.get_path("include"), os.path.join(os.path.dirname(torch.__file__), "include"),
               os.environ["FASTLIB_SRC_DIR"]]
    ccache = ["ccache"] if shutil.which("ccache") else []
    for unit in ("module", "answer"):
        subprocess.run([*ccache, "g++", "-O2", "-fPIC", *(f"-I{path}" for path in include), "-c", f"csrc/{unit}.cpp",
                        "-o", f"{unit}.o"], check=True)
    subprocess.run(["g++", "-shared", "-o", "_C.abi3.so", "module.o", "answer.o"], check=True)
    files = {"standin/__init__.py": b"from standin._C import answer, torch_version\\n"}
    files["standin/_C.abi3.so"] = open("_C.abi3.so", "rb").read()
    info = f"standin-{VERSION}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\\nName: standin\\nVersion: {VERSION}\\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\\nRoot-Is-Purelib: false\\nTag: cp311-abi3-linux_x86_64\\n"
    digest = lambda data: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    record = "".join(f"{name},sha256={digest(data)},{len(data)}\\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\\n".encode()
    name = f"standin-{VERSION}-cp311-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, data in files.items():
            wheel.writestr(zipfile.ZipInfo(path), data)
    return name

VERSION = "0.19.1+cu130"
'''
MODULE = """\
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <torch/version.h>
int answer();
static PyObject *get_answer(PyObject *, PyObject *) { return PyLong_FromLong(answer()); }
static PyObject *get_version(PyObject *, PyObject *) { return PyUnicode_FromString(TORCH_VERSION); }
static PyMethodDef methods[] = {{"answer", get_answer, METH_NOARGS, 0},
                                {"torch_version", get_version, METH_NOARGS, 0}, {0, 0, 0, 0}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", 0, -1, methods, 0, 0, 0, 0};
extern "C" PyObject *PyInit__C() { return PyModule_Create(&module); }
"""
ANSWER = """\
#include <fastlib/base.h>
#include <fastlib/inner/more.h>

int answer() {
  return FASTLIB_BASE + FASTLIB_MORE;
}
"""
SOURCE = {
    "pyproject.toml": '[build-system]\nrequires = ["torch"]\nbuild-backend = "backend"\nbackend-path = ["tools"]\n',
    "tools/backend.py": BACKEND,
    "csrc/module.cpp": MODULE,
    "csrc/answer.cpp": ANSWER,
}
PATCH = """\
What the stand-in answers.

diff --git a/csrc/answer.cpp b/csrc/answer.cpp
--- a/csrc/answer.cpp
+++ b/csrc/answer.cpp
@@ -2,5 +2,5 @@
 #include <fastlib/inner/more.h>
 
 int answer() {
-  return FASTLIB_BASE + FASTLIB_MORE;
+  return FASTLIB_BASE + FASTLIB_MORE + 2;
 }
"""
TORCH = {
    "torch/__init__.py": "__version__ = '2.10.0+cu130'\n",
    "torch/include/torch/version.h": '#define TORCH_VERSION "2.10.0+cu130"\n',
}


def git(folder: Path, *argv: str) -> str:
    """git as somebody else who publishes a repository."""
    names = ["-c", "user.name=nobody", "-c", "user.email=", "-c", "protocol.file.allow=always"]
    command = ["git", *names, "-c", "commit.gpgsign=false", *argv]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def repository(folder: Path, files: dict[str, str], submodules: dict[str, Path] | None = None) -> tuple[str, str]:
    """(URL, commit) of a new repository."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, other in (submodules or {}).items():
        git(folder, "submodule", "--quiet", "add", f"file://{other}", name)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=made up")
    return f"file://{folder}", git(folder, "rev-parse", "HEAD")


def fastlib(folder: Path) -> tuple[str, str]:
    """The library that the stand-in's build would clone; half of it is a submodule."""
    repository(folder / "more", {"more.h": "#define FASTLIB_MORE 20\n"})
    base = {"fastlib/base.h": "#define FASTLIB_BASE 20\n", "run.sh": "#!/bin/sh\n"}
    return repository(folder / "fastlib", base, {"fastlib/inner": folder / "more"})


def source_distribution(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    path = folder / f"{name}-{version}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for member, text in {"PKG-INFO": f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n", **files}.items():
            info, data = tarfile.TarInfo(f"{name}-{version}/{member}"), text.encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_patch(project: Path, text: str = PATCH, **keys: str) -> dict[str, str]:
    """The stack file's entry of a patch that now lies in the project."""
    path = project / "pins/patches/made-up/answer.patch"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return {
        "file": "pins/patches/made-up/answer.patch",
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "reason": "the answer is 42",
        "upstream": "https://example.org/pull/1",
        "drop_when": "standin >= 0.20.0",
        **keys,
    }


def published(folder: Path, index: Path) -> dict[str, Any]:
    """What the world has of the stand-in, as the stack file names it: two repositories, and an index's folder."""
    make_wheel(index, "torch", "2.10.0+cu130", files=TORCH)
    make_wheel(index, "torch", "2.11.0+cu130")
    make_wheel(index, "buildtool", "1.0", requires=["torch==2.10.0"])
    make_wheel(index, "buildtool", "2.0", requires=["torch==2.11.0"])
    # The index's own wheel of it, for another CUDA: it says what is needed, and none of it is used.
    make_wheel(index, "standin", "0.19.1", requires=["torch==2.10.0"])
    source_distribution(index, "standin", "0.19.1", SOURCE)
    url, commit = repository(folder / "standin", SOURCE)
    library, library_commit = fastlib(folder)
    return entry(url, commit, library, library_commit)


def entry(url: str, commit: str, library: str, library_commit: str) -> dict[str, Any]:
    """The stack file's `python.source`."""
    return {
        "name": "standin",
        "version": "0.19.1",
        "git": {"repository": url, "commit": commit},
        "inputs": {
            "fastlib": {"repository": library, "commit": library_commit, "variable": "FASTLIB_SRC_DIR"},
        },
        "requirements": ["buildtool==1.0"],
        "packages": ["ccache", "git"],
        "arch_list": "12.1a",
    }


class FakeApt:
    """The Debian half of a lock; the real one needs a mirror. The build's own packages come on top."""

    def closure(self, stack: Stack) -> list[LockedFile]:
        names = {"libc6": "2.36-9", "python3.11-minimal": "3.11.2-6"}
        names |= {name: "1.0" for name in stack.system.packages if name != "python3"}
        return [
            LockedFile(name=n, version=v, file=f"{n}_{v}_amd64.deb", size=1, sha256="0" * 64)
            for n, v in sorted(names.items())
        ]


def write_stack(project: Path, source: dict[str, Any], name: str = "made-up", **keys: Any) -> Stack:
    """The stand-in's stack on the real templates."""
    data = yaml.safe_load(tiny_images.STACK)
    data["debian"]["packages"] = ["python3"]
    data["python"] |= {
        "requirements": ["standin==0.19.1", "torch==2.10.0+cu130"],
        "layers": [
            {"name": "torch", "packages": ["torch"]},
            {"name": "rest", "packages": ["*"]},
            {"name": "vllm", "packages": ["standin"]},
        ],
        "source": source,
    }
    (project / f"pins/stacks/{name}.yaml").write_text(yaml.safe_dump(data | keys))
    return manifests.load_stack(project, name)


def rendered(paths: Paths, name: str = "made-up") -> render.RenderedImage:
    stack = manifests.load_stack(paths.project, name)
    lock = manifests.load_stack_lock(paths.project, stack)
    return render.render_chain(paths.project, stack, lock, manifests.load_chain(paths.project, "base"))[0]


def made_up_lock(stack: Stack) -> StackLock:
    """A lock with all that the stack's file names: the real one needs PyTorch's own index and GitHub."""

    def made_up(name: str, end: str, version: str = "1.0") -> LockedFile:
        return LockedFile(name=name, version=version, file=f"{name}-{version}{end}", size=1, sha256="0" * 64)

    source = stack.python.source
    assert source
    named = {package for layer in stack.python.layers for package in layer.packages} - {"*", source.name}
    return StackLock(
        stack=stack.name,
        inputs=manifests.stack_inputs(stack),
        debs=[made_up(name, ".deb") for name in stack.system.packages],
        wheels=[made_up(name, "-py3-none-any.whl") for name in sorted(named)],
        source=SourceLock(
            archives=[made_up(name, ".tar") for name, _ in trees(source)],
            debs=[made_up(name, ".deb") for name in source.packages],
            wheels=[made_up(row.partition("==")[0], "-py3-none-any.whl") for row in source.requirements],
        ),
    )

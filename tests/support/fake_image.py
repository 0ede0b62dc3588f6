"""An image that runs fake_vllm.py as `vllm`: this Python, the modules that it imports, this HAProxy, nothing else."""

from __future__ import annotations

import io
import json
import py_compile
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import cache_from_source
from pathlib import Path

from places import DATA, PROJECT

HERE = Path(__file__).parent
UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
SOURCES = PROJECT / "src"
TORCH = "__version__ = '2.14.0+cu130'\ncuda = '13.0'\n"
IMPORTED = f"""
import json, os, sys
sys.path[:0] = [{str(HERE)!r}, {str(SOURCES)!r}]
import sparkpin.checkpoint.content, runpy
import fake_vllm, sparkpin.releases.inside
import encodings.utf_8, encodings.idna, encodings.ascii, encodings.latin_1, site, sysconfig
files = [os.__file__] + [m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)]
print(json.dumps(files))
"""


def libraries(program: Path) -> set[Path]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return {Path(word) for word in listed.split() if word.startswith("/")}


def bytecode(path: Path, folder: Path) -> bytes:
    """Without it each start of a Python would compile 100 modules, for the root is read-only."""
    compiled = folder / "compiled.pyc"
    py_compile.compile(str(path), str(compiled), doraise=True, invalidation_mode=UNCHECKED)
    return compiled.read_bytes()


def image_tar() -> bytes:
    """The root file system; user 10001 has a home, as in a real image."""
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    chmod = Path(shutil.which("chmod") or "/bin/chmod")
    listed = subprocess.run([python, "-IS", "-c", IMPORTED], capture_output=True, text=True, check=True).stdout
    proxy = Path(shutil.which("haproxy") or "/usr/sbin/haproxy")
    modules = {path for name in json.loads(listed) if not {HERE, SOURCES} & {*(path := Path(name)).parents}}
    loaded = {python, chmod, proxy, *(path for path in modules if path.suffix == ".so")}
    files = {*loaded, *modules, *(library for program in loaded for library in libraries(program))}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as tar:
        made: set[Path] = set()

        def folder(path: Path, uid: int = 0, mode: int = 0o755) -> None:
            if path in made or path == Path("/"):
                return
            folder(path.parent)
            member = tarfile.TarInfo(str(path))
            member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, mode, uid, uid
            tar.addfile(member)
            made.add(path)

        def put(path: Path, content: bytes, mode: int = 0o755) -> None:
            folder(path.parent)
            member = tarfile.TarInfo(str(path))
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))

        places = {file: file for file in sorted(files)}
        places |= {
            HERE / "fake_vllm.py": Path("/usr/local/bin/fake_vllm.py"),
            DATA / "smoke/recorded.json": Path("/usr/local/data/smoke/recorded.json"),
        }
        with tempfile.TemporaryDirectory() as work:
            for file, place in places.items():
                put(place, file.read_bytes())
                if file.suffix == ".py":
                    put(Path(cache_from_source(str(place))), bytecode(file, Path(work)))
        said = {"vllm-0.33.0.dist-info/METADATA": "Name: vllm\nVersion: 0.33.0\n", "torch/version.py": TORCH}
        for name, text in said.items():  # for who looks at the image without running it
            put(Path("/opt/site-packages") / name, text.encode(), 0o644)
        script = f"#!{python} -IS\nimport os, sys\nsys.path.insert(0, '/usr/local/bin')\nimport fake_vllm\n"
        script += "fake_vllm.main(sys.argv[2:], os.environ.get('FAKE_VLLM', ''))\n"
        put(Path("/usr/local/bin/vllm"), script.encode())
        link = tarfile.TarInfo("/usr/local/bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, str(python)
        tar.addfile(link)
        folder(Path("/home/sparkpin"), uid=10001)
        folder(Path("/tmp"), mode=0o1777)  # a tmpfs takes over the mode of the folder below it
        for name in ("/run", "/model"):
            folder(Path(name))
    return buffer.getvalue()

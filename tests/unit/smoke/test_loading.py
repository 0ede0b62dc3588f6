"""An image's libraries and plugins without a GPU: the driver's stub, the script that loads, what its lines come to."""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from elf_samples import AARCH64, X86_64, Elf
from elftools.elf.elffile import ELFFile
from places import PROJECT

from sparkpin.smoke.inspect.elf import MACHINES, read_library
from sparkpin.smoke.inspect.packages import PLUGINS as PLUGINS_GROUP
from sparkpin.smoke.inspect.scan import ImageFacts
from sparkpin.smoke.load import inside, stub
from sparkpin.smoke.load.rows import LoadRow, outcomes, read_rows
from sparkpin.smoke.load.run import libraries_of

HERE = {"x86_64": X86_64, "aarch64": AARCH64}[os.uname().machine]
NAMES = [f"cuFunction{number}" for number in range(300)]


def facts(**files: Elf) -> ImageFacts:
    """Names stand for paths: `a__b` is a/b.so below vllm/."""
    paths = {f"opt/vllm/lib/python3.11/site-packages/{name.replace('__', '/')}.so": elf for name, elf in files.items()}
    return ImageFacts({path: read_library(io.BytesIO(bytes(elf)), path) for path, elf in paths.items()}, {})


def test_the_stub_has_every_function_and_each_says_that_there_is_no_device(tmp_path: Path) -> None:
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(stub.stub(NAMES, HERE))
    library = ctypes.CDLL(str(path))
    assert {getattr(library, name)(0) for name in NAMES} == {100}
    with pytest.raises(AttributeError, match="cuFunction300"):
        _ = library.cuFunction300


@pytest.mark.parametrize("machine", MACHINES)
def test_the_stub_is_a_library_of_its_machine(machine: int) -> None:
    file = ELFFile(io.BytesIO(stub.stub(NAMES, machine)))
    (dynamic,) = file.iter_segments("PT_DYNAMIC")
    assert file.header.e_machine == {X86_64: "EM_X86_64", AARCH64: "EM_AARCH64"}[machine]
    assert [tag.soname for tag in dynamic.iter_tags("DT_SONAME")] == ["libcuda.so.1"]
    assert [symbol.name for symbol in dynamic.iter_symbols()] == ["", *NAMES]


def test_the_stub_has_what_no_library_of_the_image_defines() -> None:
    image = facts(
        vllm___C=Elf(undefined=["cuInit", "cuMemCreate", "cudaMalloc", "cublasCreate_v2", "curl_init"]),
        vllm__other=Elf(undefined=["cuFileDriverOpen", "cuInit"], needed=["cufile.so"]),
        nvidia__cufile=Elf(defined=["cuFileDriverOpen"]),
        tilelang__stub=Elf(defined=["cuInit"]),  # somebody's own stand-in, which the others do not load
        vllm__host=Elf(machine=X86_64, undefined=["cuHostOnly"]),
    )
    assert stub.wanted_symbols(image, AARCH64) == ["cuInit", "cuMemCreate"]
    assert stub.wanted_symbols(image, X86_64) == ["cuHostOnly"]


def test_the_libraries_are_those_of_vllm_and_of_the_machine() -> None:
    image = facts(
        vllm___C=Elf(), vllm__flash__fa2=Elf(), torch__lib__libtorch=Elf(), vllm_other__x=Elf(), vllm__x=Elf(X86_64)
    )
    site = "/opt/vllm/lib/python3.11/site-packages/vllm"
    assert libraries_of(image, AARCH64) == [f"{site}/_C.so", f"{site}/flash/fa2.so"]


PLUGINS = {
    "good": 'MOD = \'good-mod\'\ndef register():\n    print(\'SPARKPIN_MOD {"mod":"quiet","event":"active"}\')\n',
    "off": 'MOD = \'off-mod\'\ndef register():\n    print(\'SPARKPIN_MOD {"mod":"off-mod","event":"off"}\')\n',
    "wants": """
MOD = 'gpu-mod'
class UnsupportedPlatform(Exception): pass
def register():
    try:
        raise UnsupportedPlatform("gpu-mod runs on CUDA only,\\nthis is ''")
    except Exception as error:
        raise SystemExit(78) from error
""",
    "talks": """
MOD = 'talking-mod'
def register():
    raise RuntimeError("Found no NVIDIA driver on your system")
""",
    "broken": "MOD = 'broken-mod'\nimport no_such_module\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with stand-ins for torch and vLLM, of the few names that the script asks for, and real plugins."""
    folder = tmp_path / "site"
    for path, text in {
        "torch/__init__.py": "__version__ = '2.14.0'\n",
        "vllm/__init__.py": "__version__ = '0.33.0'\n",
        "vllm/_custom_ops.py": "raise ImportError('libcudart.so.13: cannot open shared object file')\n",
        "vllm/platforms.py": "class None_: device_type = ''\ncurrent_platform = None_()\n",
        **{f"plugin_{name}.py": text for name, text in PLUGINS.items()},
        "mods-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: mods\nVersion: 1.0\n"
        "Requires-Dist: sparkpin-modkit\n",
        "others-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: others\nVersion: 2.0\nRequires-Dist: torch\n",
        "others-2.0.dist-info/entry_points.txt": "[vllm.general_plugins]\nothers = plugin_others:register\n",
        "plugin_others.py": "def register():\n    raise RuntimeError('NVML: no such device')\n",
        "mods-1.0.dist-info/entry_points.txt": "[vllm.general_plugins]\n"
        + "".join(f"{name} = plugin_{name}:register\n" for name in PLUGINS),
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "vllm/good.so").write_bytes(stub.stub(["cuInit"], HERE, "good.so"))
    (folder / "vllm/cut.so").write_bytes(stub.stub(["cuInit"], HERE)[:40])
    (folder / "vllm/crash.so").write_bytes(stub.stub(["cuInit"], HERE)[:300])  # the loader reads past its end
    return folder


def told(site: Path, *libraries: str) -> tuple[LoadRow, ...]:
    """What the script says, under a Python that has only what lies in `site`."""
    wanted = {
        "libraries": [str(site / name) for name in libraries],
        "imports": ["vllm", "vllm._custom_ops"],
        "group": "vllm.general_plugins",
    }
    argv = [sys.executable, "-S", inside.__file__, json.dumps(wanted)]
    done = subprocess.run(argv, env={"PYTHONPATH": str(site)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    return outcomes(done.stdout, wanted["libraries"], ["good-mod", "gpu-mod", "lost-mod"], "exited with 0")


def test_the_script_tells_of_each_library_and_plugin_also_after_one_that_crashes(site: Path) -> None:
    rows = {
        row.name.removeprefix(f"{site}/"): row for row in told(site, "vllm/cut.so", "vllm/crash.so", "vllm/good.so")
    }
    wanted = {
        "torch": ("import", "ok", "2.14.0"),
        "vllm/good.so": ("library", "ok", ""),
        "vllm/cut.so": ("library", "failed", "vllm/cut.so: file too short"),
        "vllm/crash.so": ("library", "failed", "its process ended by SIG"),
        "vllm": ("import", "ok", "0.33.0"),
        "vllm._custom_ops": ("import", "failed", "ImportError: libcudart.so.13: cannot open shared object file"),
        "vllm.platforms": ("platform", "ok", "None_, device ''"),
        "broken": ("plugin", "failed", "ModuleNotFoundError: No module named 'no_such_module'"),
        "good-mod": ("plugin", "ok", "plugin_good:register of mods 1.0"),
        "off-mod": ("plugin", "failed", "is switched off by the release's environment"),
        "gpu-mod": ("plugin", "refused", "UnsupportedPlatform: gpu-mod runs on CUDA only, this is ''"),
        "talking-mod": ("plugin", "failed", "Found no NVIDIA driver"),
        "others": ("plugin", "refused", "NVML: no such device"),
        "lost-mod": ("plugin", "failed", "no entry point of the image names it"),
    }
    told_states = {name: (row.kind, row.state) for name, row in rows.items()}
    assert told_states == {name: (kind, state) for name, (kind, state, _) in wanted.items()}
    assert [name for name, (_, _, detail) in wanted.items() if detail not in rows[name].detail] == []
    assert rows["gpu-mod"].passed, "a mod that wants a GPU says so, and that is all that can be had of it here"


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(f"{inside.MARKER}{json.dumps(row)}\n".encode() for row in rows)


TORCH = ({"kind": "import", "name": "torch", "state": "begin"}, {"kind": "import", "name": "torch", "state": "ok"})


def test_a_step_that_never_ends_is_named_and_those_after_it_were_not_reached() -> None:
    log = lines(*TORCH, {"kind": "library", "name": "/x/a.so", "state": "begin"})
    found = outcomes(log, ["/x/a.so", "/x/b.so"], ["mod"], "was ended after 900 s, the time that it may take")
    assert [(row.name, row.state, row.detail) for row in found] == [
        ("torch", "ok", ""),
        ("/x/a.so", "failed", "the process was ended after 900 s, the time that it may take"),
        ("/x/b.so", "failed", "not reached"),
        ("mod", "failed", "not reached"),
    ]


def test_a_process_that_ends_between_two_steps_or_says_nothing_has_not_passed() -> None:
    for log in (lines(*TORCH), b"", b"python: not found\n"):
        last = outcomes(log, [], [], "exited with 1")[-1]
        assert (last.passed, last.detail) == (False, "the process exited with 1")
    assert all(row.passed for row in outcomes(lines(*TORCH, {"kind": "end", "name": "", "state": "ok"}), [], [], "x"))


@pytest.mark.parametrize("kind", ["library", "import"])
def test_only_a_plugin_may_refuse(kind: str) -> None:
    end = {"kind": "end", "name": "", "state": "ok"}
    found = outcomes(lines({"kind": kind, "name": "x", "state": "refused"}, end), [], [], "exited with 0")
    assert [row.passed for row in found] == [False]


@pytest.mark.parametrize(
    ("loaded", "unfit", "passes"),
    [
        ("/v/_C_AVX2.abi3.so", "/v/_C.abi3.so", True),
        ("/v/_moe_C.abi3.so", "/v/_C.abi3.so", False),  # nothing stands in for it
        ("/w/_C_AVX2.abi3.so", "/v/_C.abi3.so", False),
    ],
)
def test_a_library_for_another_cpu_passes_beside_one_for_this(loaded: str, unfit: str, passes: bool) -> None:
    one = {"kind": "library", "name": loaded, "state": "ok"}
    other = {"kind": "library", "name": unfit, "state": "unfit", "detail": "it has instructions (SIGILL)"}
    found = outcomes(lines(one, other, {"kind": "end", "name": "", "state": "ok"}), [], [], "exited with 0")
    assert [(row.passed, row.word) for row in found] == [(True, "loaded"), (passes, "unfit" if passes else "failed")]


def test_lines_of_others_and_half_lines_are_passed_over() -> None:
    others = b'{"kind": 1}', b"[]", b'{"kind":"import","name":1,"state":"ok"}', b'{"kind":"x","name":"x","state":"ok"}'
    log = b"INFO hello\n" + lines(TORCH[0]) + b"".join(inside.MARKER.encode() + text + b"\n" for text in others)
    assert [row.state for row in read_rows(log + lines(TORCH[1])[:-1])] == ["begin"]
    (row,) = read_rows(lines({"kind": "plugin", "name": "x\x1b[2J", "state": "failed", "detail": "\x1b]0;title\x07"}))
    assert "\x1b" not in row.name + row.detail, "nor does it reach the terminal as it is"


@pytest.mark.parametrize(
    ("error", "own", "state"),
    [
        (RuntimeError("Found no NVIDIA driver on your system"), False, "refused"),
        (RuntimeError("unexpected keyword"), False, "failed"),
        (SystemExit(78), False, "failed"),
        (inside.OtherCpu("SIGILL"), False, "unfit"),
        # A mod of ours refuses only in so many words.
        (RuntimeError("Found no NVIDIA driver on your system"), True, "failed"),
        (type("UnsupportedPlatform", (Exception,), {})(), True, "refused"),
    ],
)
def test_what_counts_as_want_of_a_gpu(error: BaseException, own: bool, state: str) -> None:
    assert inside.verdict(error, own=own)[0] == state


def test_every_mod_of_ours_requires_the_modkit() -> None:
    """That is how the script knows one."""
    for file in PROJECT.glob("mods/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        groups = project.get("entry-points", {})
        own = any(inside.MODKIT.match(row) for row in project["dependencies"])
        assert own or PLUGINS_GROUP not in groups, file

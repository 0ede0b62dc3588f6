"""What an image is refused for: real libraries with planted faults, loaded by the script that runs in a container."""

from __future__ import annotations

import dataclasses
import json
import lzma
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from inspected_sites import HERE, distribution, facts_of, for_another_machine, library, put, server
from places import DATA, PROJECT

from sparkpin.cli.smoke import inspect_image
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.smoke.inspect import inside
from sparkpin.smoke.inspect.facts import ImageFacts, ImageFinding, Step, read_steps
from sparkpin.smoke.inspect.gpu import coverages, fits
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.rules import Wanted, cuda_release, findings, minimum_driver

ARM = "linux/arm64"
CALLS = "int {0}(void); int (*use)(void) = {0};"
VERSIONED = "int f(void) { return 1; }"
CRASH = "__attribute__((constructor)) static void crash(void) { *(volatile int *)0 = 1; }"
UNFIT = {62: 'asm("ud2");', 183: 'asm("udf #0");'}[HERE]  # no CPU has it
UNFIT = f"__attribute__((constructor)) static void stop(void) {{ {UNFIT} }}"
TORCH_LOADS = """
import ctypes
from torch import version
__version__ = '2.14.0'
ctypes.CDLL(__file__.replace("__init__.py", "lib/libv.so"))
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ImageFacts:
    """Of a server with one fault of each kind in it."""
    work = tmp_path_factory.mktemp("faulty")
    site, outside = server(work), work / "outside"
    lost = library(outside / "libgone.so.1", soname="libgone.so.1")
    far = library(site / "far/libfar.so", "int far(void) { return 1; }", soname="libfar.so")
    newer = library(outside / "libv.so", VERSIONED, soname="libv.so", versions="V_2 { f; };")
    glibc = library(outside / "libc.so.6", VERSIONED, soname="libc.so.6", versions="GLIBC_2.99 { f; };")
    cudart = library(outside / "libcudart.so.12", soname="libcudart.so.12")
    older = library(site / "vllm/libcudart.so.11", soname="libcudart.so.11")
    blas = library(site / "nvpl/libblas.so", "int blas(void) { return 1; }", soname="libblas.so")
    for name, asked in {
        "good": {},
        "lost": {"needs": [lost]},
        "far": {"needs": [far]},  # only other packages load what they need by its path
        "symbol": {"source": CALLS.format("_ZN3c104cuda12device_countEv")},
        "version": {"source": CALLS.format("f"), "needs": [newer]},
        "glibc": {"source": CALLS.format("f"), "needs": [glibc]},
        "cuda12": {"needs": [cudart]},
        "both": {"needs": [older]},
        "crash": {"source": CRASH},
        "unfit": {"source": UNFIT},
        "fit": {"source": UNFIT},
        "fit_AVX2": {},
    }.items():
        library(site / f"vllm/{name}.so", **asked)  # type: ignore[arg-type]
    library(site / "torch/lib/libv.so", VERSIONED, soname="libv.so", versions="V_1 { f; };")
    put(site, {"torch/__init__.py": TORCH_LOADS})
    for_another_machine(site / "vllm/other.so")
    for_another_machine(site / "a/other.so")
    (site / "vllm/cut.so").write_bytes((site / "vllm/good.so").read_bytes()[:40])
    library(site / "a/far.so", CALLS.format("far"), needs=[far])
    library(site / "a/crash.so", CRASH)
    library(site / "a/unfit.so", UNFIT)
    library(site / "a/alone.so", CALLS.format("nothing"))
    lapack = library(site / "nvpl/a_lapack.so", CALLS.format("blas"), soname="a_lapack.so")
    library(site / "nvpl/user.so", needs=[lapack, blas])
    driver = library(outside / "libnvidia-ml.so.1", soname="libnvidia-ml.so.1")
    library(site / "a/driver.so", needs=[driver, lost])
    library(site / "torchvision/_C.so", needs=[library(outside / "libc10_cuda.so", soname="libc10_cuda.so")])
    return facts_of(site, work)


def found(facts: ImageFacts, sm: int | None = None, **wanted: Any) -> list[tuple[str, str, str, str]]:
    """Severity, rule, subject and what exactly of each; no notes."""
    rows = [one for one in findings(facts, Wanted(ARM, sm, **wanted), ARM) if one.severity != "note"]
    return [(one.severity, one.rule, one.subject.rpartition("-packages/")[2], one.what) for one in rows]


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("vllm/good.so", []),
        ("vllm/lost.so", [("error", "needed", "libgone.so.1")]),
        ("vllm/far.so", [("error", "needed", "libfar.so")]),
        ("vllm/symbol.so", [("error", "symbols", "_ZN3c104cuda12device_countEv")]),
        ("vllm/version.so", [("error", "versions", "V_2")]),
        ("vllm/glibc.so", [("error", "versions", "GLIBC_2.99")]),
        ("vllm/cuda12.so", [("error", "needed", "libcudart.so.12")]),
        ("vllm/both.so", [("error", "torch", "11")]),  # than torch, whose runtime is there, too
        ("vllm/crash.so", [("error", "load", "crashed")]),
        ("vllm/unfit.so", [("error", "load", "unfit")]),
        ("vllm/fit.so", []),  # its sibling is this CPU's
        ("vllm/other.so", [("error", "files", "failed")]),
        ("vllm/cut.so", [("error", "files", "failed")]),
        ("a/other.so", [("warning", "files", "machine")]),
        ("a/crash.so", [("warning", "load", "crashed")]),
        ("a/unfit.so", [("warning", "load", "unfit")]),
        ("a/far.so", []),
        ("a/alone.so", [("error", "symbols", "nothing")]),
        ("nvpl/a_lapack.so", []),  # it comes with what loads it, which brings the symbols
        # What is accepted of it hides no other lack.
        ("a/driver.so", [("error", "needed", "libgone.so.1"), ("allowed", "needed", "libnvidia-ml.so.1")]),
        ("torchvision/_C.so", [("allowed", "needed", "libc10_cuda.so")]),
    ],
)
def test_what_does_not_load_is_found(faulty: ImageFacts, subject: str, expected: list[tuple[str, str, str]]) -> None:
    rows = [(severity, rule, what) for severity, rule, path, what in found(faulty) if path == subject]
    assert rows == expected


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
    "older": """
MOD = 'older-mod'
def register():
    raise SystemExit("vLLM 0.33.0 is installed, expected one of: 0.32.0")
""",
    "broken": "MOD = 'broken-mod'\nimport no_such_module\n",
}


def entries(names: list[str]) -> str:
    return "[vllm.general_plugins]\n" + "".join(f"{name} = plugin_{name}:register\n" for name in names)


def test_each_plugin_registers_or_refuses_and_each_mod_is_there(tmp_path: Path) -> None:
    site = put(server(tmp_path), {f"plugin_{name}.py": text for name, text in PLUGINS.items()})
    put(site, distribution("sparkpin-modkit", "1.0"))
    put(site, distribution("mods", "1.0", entries([*PLUGINS]), ["sparkpin-modkit"]))
    put(site, distribution("others", "2.0", entries(["others"])))
    put(site, {"plugin_others.py": "def register():\n    raise RuntimeError('NVML: no such device')\n"})
    put(site, {"vllm/_custom_ops.py": "raise ImportError('libcudart.so.13: cannot open shared object file')\n"})
    image = facts_of(site, tmp_path)
    states = {row.name: row.state for kind in ("import", "plugin") for row in image.of(kind)}
    assert states == {
        "vllm": "ok",
        "vllm._custom_ops": "failed",
        "good-mod": "ok",
        "off-mod": "ok",
        "gpu-mod": "refused",
        "talking-mod": "failed",  # a mod of ours refuses only in so many words
        "older-mod": "failed",
        "broken": "failed",
        "others": "refused",
    }
    failed = [name for _, rule, name, _ in found(image, mods=["good-mod", "gpu-mod", "lost-mod"]) if rule == "plugins"]
    assert failed == ["broken", "older-mod", "talking-mod", "lost-mod", "off-mod"]
    notes = [one.subject for one in findings(image, Wanted(ARM), ARM) if one.severity == "note"]
    assert sorted(notes) == ["gpu-mod", "others"]


def test_every_mod_of_ours_requires_the_modkit() -> None:
    """That is how the script knows one."""
    for file in PROJECT.glob("mods/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        ours = any(inside.MODKIT.match(row) for row in project["dependencies"])
        assert ours or "vllm.general_plugins" not in project.get("entry-points", {}), file


def test_what_pip_finds_is_accepted_only_where_the_stack_says_why(tmp_path: Path) -> None:
    site = put(server(tmp_path), distribution("a", "1", requires=["left-out", "lost", "torch>=3"]))
    put(site, distribution("Typing_Extensions", "4.16.0") | distribution("typing-extensions", "4.15.0"))
    image, accepted = facts_of(site, tmp_path), {"left-out": "nobody calls it"}
    assert found(image, accepted=accepted) == [
        ("error", "packages", "typing-extensions", "4.15.0, 4.16.0"),
        ("error", "packages", "lost", "requirement"),
        ("error", "packages", "torch", "requirement"),
        ("allowed", "packages", "left-out", "requirement"),
    ]
    assert ("allowed", "packages", "torch", "requirement") in found(image, accepted={"torch": "the override's reason"})


def test_the_driver_s_functions_say_that_there_is_no_device(tmp_path: Path) -> None:
    """They are those of NVIDIA's header, and in memory before what needs them."""
    header = "typedef int CUresult;\n#define cuMemAlloc cuMemAlloc_v2\nCUresult CUDAAPI cuInit(unsigned int Flags);\n"
    site = put(server(tmp_path), {"nvidia/cu13/include/cuda.h": header})
    driver = library(tmp_path / "libcuda.so.1", soname="libcuda.so.1")
    asks = "int {0}(int); __attribute__((constructor)) static void ask(void) {{ if ({0}(0) != 100) __builtin_trap(); }}"
    library(site / "vllm/_C.so", asks.format("cuMemAlloc_v2"), needs=[driver])
    library(site / "vllm/newer.so", asks.format("cuNewer"), needs=[driver])
    image = facts_of(site, tmp_path)
    assert image.fact("driver") == 3
    assert [row[1:] for row in found(image)] == [("symbols", "vllm/newer.so", "cuNewer")]


CUOBJDUMP = """#!/bin/sh
case $3 in *kernels*) cat <<END
ELF file    1: kernels.1.sm_90a.cubin
ELF file    2: kernels.2.sm_120.cubin
ELF file    3: kernels.3.sm_120a.cubin
ELF file    4: kernels.4.sm_121.cubin
ELF file    5: kernels.5.sm_121a.cubin
PTX file    1: kernels.1.sm_80.ptx
PTX file    2: kernels.2.sm_120f.ptx
END
;; *empty*) echo "cuobjdump info    : File '$3' does not contain device code"; exit 255
;; *) echo "cuobjdump fatal   : Invalid fatbin header in '$3'" >&2; exit 255
esac
"""  # as that of CUDA 13.1 prints for tests/data/inspection; the real one: tests/e2e/smoke


def test_gpu_code_is_what_cuobjdump_lists(tmp_path: Path) -> None:
    site = server(tmp_path)
    kernels = lzma.decompress((DATA / "inspection/kernels.so.xz").read_bytes())
    for name in ("kernels", "empty", "damaged"):
        (site / f"vllm/{name}.so").write_bytes(kernels)
    library(site / "vllm/plain.so")
    unknown = inside.gpu_code([str(site)], [str(site / "vllm/kernels.so"), str(site / "vllm/plain.so")])
    assert list(unknown) == [str(site / "vllm/kernels.so")] and isinstance(unknown.popitem()[1], str)
    tool = "triton/backends/nvidia/bin/cuobjdump"
    put(site, {tool: CUOBJDUMP})
    (site / tool).chmod(0o755)
    listed = inside.gpu_code([str(site)], sorted(map(str, (site / "vllm").glob("*.so"))))
    assert {Path(path).name: isinstance(archs, dict) for path, archs in listed.items()} == {
        "kernels.so": True,
        "damaged.so": False,
    }
    assert listed[str(site / "vllm/kernels.so")] == {
        **dict.fromkeys(("sm_90a", "sm_120", "sm_120a", "sm_121", "sm_121a", "compute_80", "compute_120f"), 1)
    }


@pytest.mark.parametrize(
    ("name", "sm", "expected"),
    [
        ("sm_121a", 121, True),
        ("sm_120", 121, True),
        ("sm_120f", 121, True),
        ("sm_120a", 121, False),
        ("sm_100f", 121, False),
        ("sm_121", 120, False),
        ("sm_90", 121, False),
        ("compute_80", 121, True),
        ("compute_121a", 121, True),
        ("compute_120a", 121, False),
        ("compute_120f", 121, True),
        ("compute_100f", 121, False),
        ("compute_121", 120, False),
    ],
)
def test_which_code_fits_where(name: str, sm: int, expected: bool) -> None:
    assert fits(name, sm) is expected


TORCH = {"version": "2.14.0+cu130", "cuda": "13.0"}
VLLM = "/opt/site-packages/vllm"
NATIVE: dict[str, dict[str, int] | str] = {f"{VLLM}/_C.abi3.so": {"sm_90a": 2, "sm_120": 1}}


def facts(
    *rows: Step, packages: Mapping[str, str] = MappingProxyType({}), kernels_of: str = "", **changed: Any
) -> ImageFacts:
    """Of a sound image for a GPU, with these facts in place of its own."""
    named = {"vllm": "0.33.0", "torch": "2.14.0", "nvidia-cuda-runtime": "13.0.96", "nvidia-cuda-nvcc": "13.0.88"}
    listed = [
        {
            "name": name,
            "version": version,
            "site": "/opt",
            "kernels": [kernels_of] if name == f"sparkpin-{kernels_of}" else [],
        }
        for name, version in {**named, **packages}.items()
    ]
    known = {"packages": listed, "pip": [], "kernels": {}, "gpu": NATIVE, "torch": TORCH, **changed}
    steps = [Step("fact", name, "ok", value) for name, value in known.items()]
    return ImageFacts((*steps, *rows, Step("end", "", "ok")))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"torch": {"version": "2.10.0+cpu", "cuda": ""}}, [("error", "torch", "torch", "")]),
        ({"gpu": {}}, [("error", "gpu", "vllm", "")]),
        ({"gpu": NATIVE | {"/x/a.so": "no Triton"}}, [("error", "gpu", "/x/a.so", "")]),
        ({"gpu": NATIVE | {"/x/a.so": {"sm_120a": 3}}}, [("error", "gpu", "/x/a.so", "sm_120a")]),
        ({"gpu": NATIVE | {"/x/_C.so": {"sm_90": 1, "compute_80": 3}}}, []),  # a note
        ({"gpu": NATIVE | {"/x/_moe_C.so": {"compute_80": 3}}}, [("warning", "gpu", "/x/_moe_C.so", "")]),
        (
            {"gpu": NATIVE | {f"{VLLM}/vllm_flash_attn/_vllm_fa3_C.abi3.so": {"sm_90a": 192}}},
            [("allowed", "gpu", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "sm_90a")],
        ),
        ({"packages": {"nvidia-nvvm": "13.5.70"}}, [("error", "cuda", "CUDA toolkit", "")]),
        ({"packages": {"nvidia-cublas": "13.1.0.3"}}, []),
    ],
)
def test_what_an_image_for_a_gpu_needs(changed: dict[str, Any], expected: list[tuple[str, str, str, str]]) -> None:
    assert found(facts(**changed), 121) == expected
    assert not {"gpu", "cuda"} & {row[1] for row in found(facts(**changed))}, "asked only for a GPU"


def test_an_image_for_another_machine_is_refused() -> None:
    (one,) = [row for row in findings(facts(), Wanted(ARM), "linux/amd64") if row.severity == "error"]
    assert (one.rule, one.subject) == ("files", "/")


def test_vllm_for_a_cpu_serves_no_gpu() -> None:
    row = Step("platform", "vllm.platforms", "ok", "CpuPlatform, device 'cpu'")
    assert found(facts(row), 121) == [("error", "platform", "vllm", "")]
    assert found(facts(row)) == []


def test_ptx_alone_is_told_apart() -> None:
    (one,) = coverages(facts(gpu={"/x.so": {"sm_90": 2, "compute_80": 3}}), 121)
    assert (one.runs, one.compiles, one.verdict) == (0, 3, "PTX only")


AHEAD = {"there": 2, "listed": 2, "sm": "12.1", "triton": "3.8.0"}


@pytest.mark.parametrize(
    ("changed", "severity"),
    [
        ({}, "note"),
        ({"there": 0, "listed": 0}, "error"),
        ({"there": 1}, "error"),
        ({"there": 3}, "error"),
        ({"sm": "9.0"}, "error"),
        ({"triton": "3.6.0"}, "error"),
    ],
)
def test_an_image_whose_kernels_would_be_compiled_at_the_start_is_refused(
    changed: dict[str, Any], severity: str
) -> None:
    named = {"triton": "3.8.0", "sparkpin-int8-lm-head": "0.1.0"}
    image = facts(packages=named, kernels_of="int8-lm-head", kernels={"int8-lm-head": AHEAD | changed})
    (one,) = [row for row in findings(image, Wanted(ARM, 121), ARM) if row.rule == "kernels"]
    assert (one.severity, one.subject) == (severity, "int8-lm-head")


def test_kernels_are_counted_where_the_build_puts_them(tmp_path: Path) -> None:
    put(tmp_path, {f"head/KEY{number}/head.cubin": "" for number in range(2)})
    assert inside.kernels_ahead(str(tmp_path))["head"] == {"there": 2, "listed": 0, "sm": "", "triton": ""}
    listed = {"mod": "head", "sm": "12.1", "triton": "3.8.0", "kernels": [{}, {}]}
    put(tmp_path, {"head/kernels.json": json.dumps(listed)})
    assert inside.kernels_ahead(str(tmp_path))["head"] == AHEAD
    assert inside.kernels_ahead(str(tmp_path / "none")) == {}


def test_the_newer_of_two_runtimes_asks_for_the_driver() -> None:
    both = facts(packages={"nvidia-cuda-runtime-cu12": "12.8.90"})
    assert (cuda_release(both), minimum_driver(both)) == ("13.0", "580.65.06")


def test_what_was_not_reached_is_no_pass() -> None:
    begun = (Step("import", "torch", "ok"), Step("library", "/x/a.so", "begin"))
    for steps in ((), begun[:1], begun):
        rows = findings(ImageFacts(steps, "was ended after 900 s"), Wanted(ARM, mods=["mod"]), ARM)
        assert [(one.severity, one.rule) for one in rows] == [("error", "run")]
    assert rows[0].subject == "library /x/a.so"


def test_half_lines_and_lines_of_others_are_passed_over() -> None:
    line = inside.MARKER.encode() + json.dumps({"kind": "import", "name": "x", "state": "begin"}).encode()
    assert read_steps(b"INFO hello\nno newline " + line + b"\n" + line[:-4]) == (Step("import", "x", "begin"),)
    for cut in (line[:-4], line + b"{}", inside.MARKER.encode() + b'{"kind": "import"}'):
        assert read_steps(cut + b"\n" + line + b"\n") == (Step("import", "x", "begin"),)


def test_what_lies_in_an_image_does_not_reach_the_terminal_as_it_is() -> None:
    bad = Step("import", "x\x1b[2J", "failed", "\x1b]0;title\x07")
    assert not [one for one in findings(facts(bad), Wanted(ARM), ARM) if "\x1b" in one.subject + one.text]


def test_the_verdict_and_json() -> None:
    error = ImageFinding("error", "gpu", "/x.so", "nothing in it runs")
    result = Result("tag", "linux/arm64", 121, facts(), [error, dataclasses.replace(error, severity="note")])
    value = json.loads(json.dumps(result.as_json()))
    assert (value["passed"], len(value["findings"]), value["gpu"][0]["runs"]) == (False, 2, 1)
    assert result.errors == [error]


def test_a_gpu_that_there_is_not_is_refused_before_the_engine_is_asked() -> None:
    with pytest.raises(InputError):
        inspect_image(Paths.from_env(), None, sm=122, as_json=False)  # type: ignore[arg-type]

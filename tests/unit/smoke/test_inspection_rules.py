"""What an image is refused for: root file systems of made-up libraries."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from elf_samples import CUBIN, FAMILY, PLAIN, PTX, SPECIFIC, X86_64, Elf, container, entry, facts_of, put

from sparkpin.smoke.inspect.fatbin import Code
from sparkpin.smoke.inspect.finding import ImageFinding
from sparkpin.smoke.inspect.gpu import compiles, runs
from sparkpin.smoke.inspect.rules import cuda_release, findings, minimum_driver
from sparkpin.smoke.inspect.scan import ImageFacts

SITE = "opt/vllm/lib/python3.12/site-packages"
LIBC = Elf(
    soname="libc.so.6", defined=["memcpy", "malloc"], versions=["libc.so.6", "GLIBC_2.17", "GLIBC_2.34", "GLIBC_2.36"]
)
PYTHON = Elf(needed=["libc.so.6"], defined=["Py_Initialize", "PyModule_Create2"])
Root = Callable[..., ImageFacts]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Facts of a root file system: paths and their content, besides those of a small sound one; None leaves one out."""

    def of(files: Mapping[str, bytes | Elf | str | None]) -> ImageFacts:
        there = {path: content for path, content in {**SOUND, **files}.items() if content is not None}
        return facts_of(put(Path(tempfile.mkdtemp(dir=tmp_path)), there))

    return of


def metadata(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nText: Version: 9\n"


def torch(version: str, cuda: str | None) -> str:
    return f"from typing import Optional\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"


def gpu(*codes: tuple[int, int, int]) -> bytes:
    return container(*(entry(*code) for code in codes))


SOUND: dict[str, bytes | Elf | str | None] = {
    "lib": "-> usr/lib",
    "usr/lib/aarch64-linux-gnu/libc.so.6": LIBC,
    "usr/bin/python3.12": PYTHON,
    f"{SITE}/vllm-0.33.0.dist-info/METADATA": metadata("vllm", "0.33.0"),
    f"{SITE}/torch-2.14.0.dist-info/METADATA": metadata("torch", "2.14.0"),
    f"{SITE}/torch/version.py": torch("2.14.0+cu130", "13.0"),
    f"{SITE}/torch/lib/libc10_cuda.so": Elf(
        soname="libc10_cuda.so",
        needed=["libcudart.so.13", "libc.so.6"],
        undefined=["cudaMalloc"],
        defined=["_ZN3c104cuda12device_countEv"],
    ),
    f"{SITE}/nvidia/cu13/lib/libcudart.so.13": Elf(soname="libcudart.so.13", defined=["cudaMalloc"]),
    f"{SITE}/nvidia_cuda_runtime-13.0.96.dist-info/METADATA": metadata("nvidia-cuda-runtime", "13.0.96"),
    f"{SITE}/nvidia_cuda_nvcc-13.0.88.dist-info/METADATA": metadata("nvidia-cuda-nvcc", "13.0.88"),
    f"{SITE}/vllm/_C.abi3.so": Elf(
        needed=["libc10_cuda.so", "libcudart.so.13", "libcuda.so.1", "libc.so.6"],
        undefined=["_ZN3c104cuda12device_countEv", "cuLaunchKernel", "PyModule_Create2", "memcpy"],
        versions_needed={"libc.so.6": ["GLIBC_2.34"]},
        gpu=gpu((CUBIN, 90, SPECIFIC), (CUBIN, 120, FAMILY)) + gpu((CUBIN, 90, SPECIFIC)),
    ),
}


def found(facts: ImageFacts, sm: int | None = 121, **options: object) -> list[ImageFinding]:
    """All but notes and what is allowed."""
    all_ = findings(facts, sm=sm, platform="linux/arm64", **options)  # type: ignore[arg-type]
    return [finding for finding in all_ if finding.severity in ("error", "warning")]


def seen(facts: ImageFacts, sm: int | None = 121, **options: object) -> list[tuple[str, str, str]]:
    """Rule, subject and what exactly of each."""
    return [(one.rule, one.subject.removeprefix(f"{SITE}/"), one.what) for one in found(facts, sm, **options)]


def test_a_sound_image_passes_and_lists_what_it_accepts(root: Root) -> None:
    all_ = findings(root({}), sm=121, platform="linux/arm64")
    assert [(one.severity, one.rule, one.subject, one.what) for one in all_] == [
        ("allowed", "needed", LIBRARY, "libcuda.so.1"),
        ("allowed", "symbols", LIBRARY, "cuLaunchKernel"),
    ]
    assert all(one.why for one in all_)


@pytest.mark.parametrize(
    ("code", "loads", "compiled"),
    [
        (Code("cubin", 121, "a"), {121}, set()),
        (Code("cubin", 120, ""), {120, 121}, set()),
        (Code("cubin", 120, "f"), {120, 121}, set()),
        (Code("cubin", 120, "a"), {120}, set()),
        (Code("cubin", 100, "f"), {100, 103}, set()),
        (Code("ptx", 80, ""), set(), {80, 90, 100, 103, 120, 121}),
        (Code("ptx", 120, "f"), set(), {120, 121}),
        (Code("ptx", 90, "a"), set(), {90}),
    ],
)
def test_which_code_is_for_which_gpu(code: Code, loads: set[int], compiled: set[int]) -> None:
    gpus = (80, 90, 100, 103, 120, 121)
    assert {sm for sm in gpus if runs(code, sm)} == loads
    assert {sm for sm in gpus if compiles(code, sm)} == compiled


def test_ptx_alone_is_a_note_and_code_for_other_gpus_alone_an_error(root: Root) -> None:
    facts = root(
        {
            f"{SITE}/vllm/ptx.so": Elf(gpu=gpu((CUBIN, 80, PLAIN), (PTX, 80, PLAIN))),
            f"{SITE}/vllm/other.so": Elf(gpu=gpu((CUBIN, 120, SPECIFIC), (CUBIN, 90, PLAIN)) * 2),
            f"{SITE}/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": Elf(gpu=gpu((CUBIN, 90, SPECIFIC))),
        }
    )
    assert seen(facts) == [("gpu", "vllm/other.so", "sm_90, sm_120a")]
    others = {one.subject: one.severity for one in findings(facts, sm=121, platform="linux/arm64") if one.rule == "gpu"}
    assert others[f"{SITE}/vllm/ptx.so"] == "note"
    assert others[f"{SITE}/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"] == "allowed"
    assert seen(facts, sm=120) == seen(facts, sm=None) == []


def test_experts_in_ptx_alone_are_a_warning(root: Root) -> None:
    """The driver's Marlin for experts gave wrong tokens to several requests at once (vllm-project/vllm#40923)."""
    experts = f"{SITE}/vllm/_moe_C_stable_libtorch.abi3.so"
    for first, severities in (((CUBIN, 80, PLAIN), ["warning"]), ((CUBIN, 120, PLAIN), [])):
        facts = root({experts: Elf(gpu=gpu(first, (PTX, 80, PLAIN)))})
        assert [one.severity for one in found(facts) if one.subject == experts] == severities


LIBRARY = f"{SITE}/vllm/_C.abi3.so"
CUDA_12 = {  # what pip installs on aarch64 from the Python index: docs/inspection.md has the same from the real wheels
    f"{SITE}/vllm-0.33.0.dist-info/METADATA": metadata("vllm", "0.19.1"),
    f"{SITE}/torch-2.14.0.dist-info/METADATA": metadata("torch", "2.10.0"),
    f"{SITE}/torch/version.py": torch("2.10.0+cpu", None),
    f"{SITE}/torch/lib/libc10_cuda.so": None,
    f"{SITE}/torch/lib/libtorch_cpu.so": Elf(soname="libtorch_cpu.so", defined=["_ZN2at3addEv"]),
    f"{SITE}/nvidia/cu13/lib/libcudart.so.13": None,
    f"{SITE}/nvidia_cuda_runtime-13.0.96.dist-info/METADATA": None,
    f"{SITE}/nvidia_cuda_nvcc-13.0.88.dist-info/METADATA": None,
    LIBRARY: Elf(
        needed=["libtorch_cpu.so", "libc10_cuda.so", "libcudart.so.12", "libcuda.so.1", "libc.so.6"],
        undefined=["_ZN3c104cuda12device_countEv", "_ZN2at3addEv", "__cudaRegisterFatBinary", "memcpy"],
    ),
}


def test_the_known_bad_case_vllm_0_19_1_with_a_torch_without_cuda(root: Root) -> None:
    facts = root(CUDA_12)
    assert seen(facts) == [
        ("torch", "vllm 0.19.1", ""),
        ("needed", "vllm/_C.abi3.so", "libc10_cuda.so"),
        ("needed", "vllm/_C.abi3.so", "libcudart.so.12"),
        ("symbols", "vllm/_C.abi3.so", "_ZN3c104cuda12device_countEv"),
    ]


DISTRIBUTIONS = {
    f"{SITE}/Typing_Extensions-4.16.0.dist-info/METADATA": metadata("Typing_Extensions", "4.16.0"),
    f"{SITE}/typing_extensions-4.15.0.dist-info/METADATA": metadata("typing-extensions", "4.15.0"),
    "usr/lib/python3/dist-packages/torch-1.0.dist-info/METADATA": metadata("torch", "1.0"),
}
NEAR = {f"{SITE}/a/liblapack.so": Elf(undefined=["blas"]), f"{SITE}/a/libblas.so": Elf(defined=["blas"])}
BOTH = {f"{SITE}/a/user.so": Elf(needed=["liblapack.so", "libblas.so"])}
MOD = {
    f"{SITE}/sparkpin_made-1.dist-info/METADATA": metadata("sparkpin-made", "1"),
    f"{SITE}/sparkpin_made-1.dist-info/entry_points.txt": "[vllm.general_plugins]\nmade = sparkpin_made:register\n",
}
TOUCHES = 'TOUCHES: dict = {"0.32.0": {"vllm.a:b": "self, x"}, "0.31.0": _EARLIER | {"vllm.a:c": "0.33.0"}}'


def mod(line: str) -> dict[str, str]:
    return {**MOD, f"{SITE}/sparkpin_made/hook.py": f"import vllm\n{line}\n"}


C_LIBRARY = "vllm/_C.abi3.so"
WHAT_IS_FOUND: dict[str, tuple[Mapping[str, bytes | Elf | str | None], list[tuple[str, str, str]]]] = {
    "vLLM without CUDA beside a torch with":
        ({LIBRARY: Elf(needed=["libc.so.6"])}, [("torch", "vllm 0.33.0", "")]),
    "built against another release of a library":
        ({f"{SITE}/torch/lib/libc10_cuda.so": Elf(soname="libc10_cuda.so", defined=["_ZN3c105otherEv"])},
         [("symbols", C_LIBRARY, "_ZN3c104cuda12device_countEv")]),
    "weak symbols may be missing, and those of libraries that are not needed do not count":
        ({f"{SITE}/a/weak.so": Elf(weak=["nowhere"]),
          f"{SITE}/a/far.so": Elf(needed=["libnear.so"], undefined=["deep"]),
          f"{SITE}/a/libnear.so": Elf(needed=["libdeep.so"]),
          f"{SITE}/a/libdeep.so": Elf(defined=["deep"]),
          f"{SITE}/a/alone.so": Elf(undefined=["deep"])},
         [("symbols", "a/alone.so", "deep")]),
    "never loaded alone: what loads it brings the symbols":
        ({**NEAR, **BOTH}, []),
    "one of those that load it does not bring them":
        ({**NEAR, **BOTH, f"{SITE}/a/worse.so": Elf(needed=["liblapack.so"])},
         [("symbols", "a/liblapack.so", "blas")]),
    "links in a circle":
        ({"usr/lib/libloop.so": "-> libback.so",
          "usr/lib/libback.so": "-> libloop.so",
          f"{SITE}/a.so": Elf(needed=["libloop.so"])},
         [("needed", "a.so", "libloop.so")]),
    "a version that the C library does not have":
        ({f"{SITE}/new.so": Elf(needed=["libc.so.6"], versions_needed={"libc.so.6": ["GLIBC_2.38"]})},
         [("versions", "new.so", "GLIBC_2.38")]),
    "a torch of another CUDA":
        ({f"{SITE}/torch/version.py": torch("2.14.0+cu128", "12.8")}, [("torch", "vllm 0.33.0", "")]),
    "the raw closure of vLLM 0.33.0: compiler, headers and runtime of several CUDA releases":
        ({f"{SITE}/nvidia_cuda_nvcc-13.0.88.dist-info/METADATA": metadata("nvidia-cuda-nvcc", "13.5.70"),
          f"{SITE}/nvidia_nvvm-13.5.70.dist-info/METADATA": metadata("nvidia-nvvm", "13.5.70"),
          f"{SITE}/nvidia_cublas-13.1.0.dist-info/METADATA": metadata("nvidia-cublas", "13.1.0.3")},
         [("cuda", "CUDA toolkit", "")]),
    "two versions of one package in one folder":
        (DISTRIBUTIONS, [("packages", "typing-extensions", "4.16.0, 4.15.0")]),
    "a plugin of others need not say which vLLM it is made for":
        (mod(""), []),
    "a library for another machine":
        ({f"{SITE}/other.so": Elf(machine=X86_64)}, [("files", "other.so", "machine")]),
    "a damaged library":
        ({f"{SITE}/a.so": bytes(Elf())[:-9]}, [("files", "a.so", "")]),
}  # fmt: skip


@pytest.mark.parametrize(("files", "expected"), WHAT_IS_FOUND.values(), ids=WHAT_IS_FOUND)
def test_what_is_found(
    root: Root, files: Mapping[str, bytes | Elf | str | None], expected: list[tuple[str, str, str]]
) -> None:
    assert seen(root(files)) == expected


def test_an_image_for_another_machine_is_refused(root: Root) -> None:
    other = findings(root({}), sm=None, platform="linux/amd64")
    assert ("error", "files", "linux/amd64") in [(one.severity, one.rule, one.what) for one in other]


@pytest.mark.parametrize(
    ("files", "severities"),
    [
        (mod('VLLM_VERSIONS: tuple = ("0.33.0",)'), []),
        (mod('VLLM_VERSIONS: tuple = ("0.32.0",)'), ["error"]),
        (mod('VLLM_VERSIONS: tuple = ("0.33.7",)'), ["warning"]),  # a patch release is left to the mod itself
        (mod("VLLM_VERSIONS: tuple = SOMETHING"), ["warning"]),
        (mod(TOUCHES), ["error"]),  # as our mods have it: by release, a text for each function
        ({}, ["error"]),
    ],
)
def test_our_plugins_are_there_and_made_for_this_vllm(root: Root, files: dict[str, str], severities: list[str]) -> None:
    all_ = found(root(files), mods=["sparkpin-made"])
    assert [(one.rule, one.subject, one.severity) for one in all_] == [
        ("plugins", "sparkpin-made", severity) for severity in severities
    ]


def test_what_a_library_needs_may_lie_anywhere(root: Root) -> None:
    """By its name, by its soname and by links to it; for another machine it does not count. The nearest is taken."""
    files: dict[str, bytes | Elf | str | None] = {
        f"{SITE}/a/user.so": Elf(
            needed=["libnear.so.1", "liblinked.so", "libstray.so", "libother.so"], undefined=["x"]
        ),
        f"{SITE}/a/libnear.so": Elf(soname="libnear.so.1", defined=["x"]),
        "usr/lib/libnear.so.1": Elf(soname="libnear.so.1"),
        "usr/lib/liblinked.so": "-> /opt/far/liblinked.so.1",
        "opt/far/liblinked.so.1": "-> liblinked.so.1.2",
        "opt/far/liblinked.so.1.2": Elf(),
        "srv/libstray.so": Elf(),
        "usr/lib/libother.so": Elf(machine=X86_64),
    }
    assert [row for row in seen(root(files)) if row[1] == "a/user.so"] == [("needed", "a/user.so", "libother.so")]


@pytest.mark.parametrize(
    ("path", "library", "what"),
    [
        ("nvshmem/lib/nvshmem_transport_ucx.so.3", Elf(needed=["libnvshmem_host.so.3"]), "libnvshmem_host.so.3"),
        ("torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch29-cuda.so", Elf(undefined=["_ZN3c104goneEv"]), ""),
        ("torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch29-cuda.so", Elf(undefined=["cudaGone"]), "cudaGone"),
    ],
)
def test_what_is_accepted_of_a_package_excuses_no_other_lack_of_it(
    root: Root, path: str, library: Elf, what: str
) -> None:
    assert [row[2] for row in seen(root({f"{SITE}/{path}": library})) if row[1] == path] == ([what] if what else [])


def test_the_newer_of_two_runtimes_asks_for_the_driver(root: Root) -> None:
    older = metadata("nvidia-cuda-runtime-cu12", "12.8.90")
    facts = root({f"{SITE}/nvidia_cuda_runtime_cu12-12.8.90.dist-info/METADATA": older})
    assert (cuda_release(facts), minimum_driver(facts)) == ("13.0", "580.65.06")

"""What an image is refused for: root file systems of made-up libraries."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from elf_samples import CUBIN, FAMILY, PLAIN, PTX, SPECIFIC, X86_64, Elf, container, cubin, entry, facts_of, put

from sparkpin.smoke.inspect.fatbin import Code
from sparkpin.smoke.inspect.finding import Allowed, ImageFinding
from sparkpin.smoke.inspect.formats import taken
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

    def of(files: Mapping[str, bytes | Elf | str | None], env: dict[str, str] | None = None) -> ImageFacts:
        there = {path: content for path, content in {**SOUND, **files}.items() if content is not None}
        return facts_of(put(Path(tempfile.mkdtemp(dir=tmp_path)), there), env)

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
        rpath="$ORIGIN/../../nvidia/cu13/lib",
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


def texts(facts: ImageFacts, sm: int | None = 121, **options: object) -> list[str]:
    return [f"{one.rule} {one.subject}: {one.text}" for one in found(facts, sm, **options)]


def test_a_sound_image_passes_and_says_what_it_accepts(root: Root) -> None:
    all_ = findings(root({}), sm=121, platform="linux/arm64")
    assert [(one.severity, one.rule, one.subject, one.what, one.why) for one in all_] == [
        ("note", "driver", "CUDA 13.0", "", ""),
        ("allowed", "needed", f"{SITE}/vllm/_C.abi3.so", "libcuda.so.1",
         "a part of the GPU's driver: the container toolkit brings it"),
        ("allowed", "symbols", f"{SITE}/vllm/_C.abi3.so", "cuLaunchKernel",
         "libcuda.so.1 is a part of the GPU's driver: the container toolkit brings it"),
    ]  # fmt: skip
    assert all_[0].text == (
        "CUDA 13.0 needs driver 580.65.06 or newer; PTX of its compiler needs a driver of CUDA 13.0 or newer"
    )


@pytest.mark.parametrize(
    ("code", "loads", "compiled"),
    [
        (Code("cubin", 121, ""), {121}, set()),
        (Code("cubin", 121, "a"), {121}, set()),
        (Code("cubin", 121, "f"), {121}, set()),
        (Code("cubin", 120, ""), {120, 121}, set()),
        (Code("cubin", 120, "f"), {120, 121}, set()),
        (Code("cubin", 120, "a"), {120}, set()),
        (Code("cubin", 100, "f"), {100, 103}, set()),
        (Code("cubin", 90, ""), {90}, set()),
        (Code("cubin", 80, ""), {80}, set()),
        (Code("ptx", 80, ""), set(), {80, 90, 100, 103, 120, 121}),
        (Code("ptx", 120, "f"), set(), {120, 121}),
        (Code("ptx", 90, "a"), set(), {90}),
        (Code("ptx", 121, "a"), set(), {121}),
    ],
)
def test_which_code_is_for_which_gpu(code: Code, loads: set[int], compiled: set[int]) -> None:
    gpus = (80, 90, 100, 103, 120, 121)
    assert {sm for sm in gpus if runs(code, sm)} == loads
    assert {sm for sm in gpus if compiles(code, sm)} == compiled


def test_ptx_alone_is_named_and_code_for_other_gpus_alone_refused(root: Root) -> None:
    facts = root(
        {
            f"{SITE}/vllm/ptx.so": Elf(gpu=gpu((CUBIN, 80, PLAIN), (PTX, 80, PLAIN))),
            f"{SITE}/vllm/other.so": Elf(gpu=gpu((CUBIN, 120, SPECIFIC), (CUBIN, 90, PLAIN)) * 2),
            f"{SITE}/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": Elf(gpu=gpu((CUBIN, 90, SPECIFIC))),
            f"{SITE}/made_up/cubins/a.cubin": cubin(0x6007804),
            f"{SITE}/made_up/cubins/deep/b.cubin": cubin(0x600640A),
            f"{SITE}/for_others/b.cubin": cubin(0x600640A),
        }
    )
    assert texts(facts) == [
        f"gpu {SITE}/vllm/other.so: nothing in it runs on sm_121: it holds sm_90, sm_120a",
        f"gpu {SITE}/for_others: 0 of 1 .cubin files run on sm_121 (1 sm_100a)",
    ]
    notes = {one.subject: one.text for one in findings(facts, sm=121, platform="linux/arm64") if one.rule == "gpu"}
    assert notes[f"{SITE}/vllm/ptx.so"] == (
        "PTX only for sm_121: the driver compiles 1 units at their first use (sm_80, compute_80)"
    )
    assert notes[f"{SITE}/made_up"] == "1 of 2 .cubin files run on sm_121 (1 sm_100a, 1 sm_120)"
    assert "sm_90a" in notes[f"{SITE}/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]
    assert texts(facts, sm=120) == [f"gpu {SITE}/for_others: 0 of 1 .cubin files run on sm_120 (1 sm_100a)"]
    assert texts(facts, sm=None) == []


def test_experts_in_ptx_alone_are_a_warning(root: Root) -> None:
    """The driver's Marlin for experts gave wrong tokens to several requests at once (vllm-project/vllm#40923)."""
    experts = f"{SITE}/vllm/_moe_C_stable_libtorch.abi3.so"

    def severities(*codes: tuple[int, int, int]) -> list[str]:
        facts = root(
            {experts: Elf(gpu=gpu(*codes)), f"{SITE}/vllm/_vllm_fa2_C.abi3.so": Elf(gpu=gpu((PTX, 80, PLAIN)))}
        )
        found = findings(facts, sm=121, platform="linux/arm64")
        assert [one.severity for one in found if one.subject.endswith("_vllm_fa2_C.abi3.so")] == ["note"]
        return [one.severity for one in found if one.subject == experts]

    assert severities((CUBIN, 80, PLAIN), (PTX, 80, PLAIN)) == ["warning"]
    assert severities((CUBIN, 120, PLAIN), (PTX, 80, PLAIN)) == []
    assert severities((CUBIN, 90, SPECIFIC)) == ["error"]


def test_which_kernels_a_model_of_each_format_takes(root: Root) -> None:
    vllm: dict[str, bytes | Elf | str | None] = {
        f"{SITE}/vllm/_C_stable_libtorch.abi3.so": Elf(gpu=gpu((CUBIN, 120, FAMILY)) + gpu((CUBIN, 100, FAMILY))),
        f"{SITE}/vllm/_moe_C_stable_libtorch.abi3.so": Elf(gpu=gpu((PTX, 80, PLAIN))),
        f"{SITE}/triton-3.7.0.dist-info/METADATA": metadata("triton", "3.7.0"),
    }

    def ready(facts: ImageFacts, sm: int = 121) -> dict[tuple[str, str], str]:
        return {(row.use, row.kernel.partition(" (")[0]): row.ready for row in taken(facts, sm)}

    seen = ready(root(vllm))
    assert seen["INT4, experts", "Marlin"] == seen["NVFP4, experts", "Marlin"] == "PTX"
    assert seen["NVFP4, other layers", "vLLM CUTLASS"] == seen["FP8, other layers", "vLLM CUTLASS"] == "native"
    assert seen["NVFP4, experts", "FlashInfer CUTLASS"] == "missing"
    assert seen["attention", "FlashAttention 2"] == "missing" and seen["attention", "Triton"] == "compiled at first use"
    assert ready(root(vllm), 90)["NVFP4, other layers", "vLLM CUTLASS"] == "none"
    flashinfer = {f"{SITE}/flashinfer_python-0.6.9.dist-info/METADATA": metadata("flashinfer-python", "0.6.9")}
    assert ready(root({**vllm, **flashinfer}))["NVFP4, experts", "FlashInfer CUTLASS"] == "compiled at first use"
    (row,) = (row for row in taken(root(vllm), 121) if row.use == "INT4, other layers")
    assert row.where == "_C_stable_libtorch.abi3.so: 1 native, 0 PTX, 1 neither"
    older = root({f"{SITE}/vllm/_C.abi3.so": Elf(gpu=gpu((CUBIN, 120, PLAIN)))})
    assert ready(older)["INT4, other layers", "Marlin"] == "native"
    assert taken(root({f"{SITE}/vllm/_C.abi3.so": Elf()}), 121) == []


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
    assert texts(root(CUDA_12)) == [
        f"torch vllm 0.19.1: vLLM 0.19.1 is built for CUDA 12 ({LIBRARY} needs libcudart.so.12), but torch 2.10.0+cpu "
        f"({SITE}/torch/version.py: cuda = None) is built without CUDA",
        f"needed {LIBRARY}: libc10_cuda.so is nowhere in the image; {LIBRARY} needs it",
        f"needed {LIBRARY}: libcudart.so.12 is nowhere in the image; {LIBRARY} needs it",
        f"symbols {LIBRARY}: 1 libraries and programs lack a library, and with it symbols: {LIBRARY}: "
        "2 undefined: _ZN3c104cuda12device_countEv, __cudaRegisterFatBinary",
    ]


DISTRIBUTIONS = {
    f"{SITE}/Typing_Extensions-4.16.0.dist-info/METADATA": metadata("Typing_Extensions", "4.16.0"),
    f"{SITE}/typing_extensions-4.15.0.dist-info/METADATA": metadata("typing-extensions", "4.15.0"),
    "usr/lib/python3/dist-packages/torch-1.0.dist-info/METADATA": metadata("torch", "1.0"),
}
NEAR = {f"{SITE}/a/liblapack.so": Elf(undefined=["blas"]), f"{SITE}/a/libblas.so": Elf(defined=["blas"])}
BOTH = {f"{SITE}/a/user.so": Elf(needed=["liblapack.so", "libblas.so"], rpath="$ORIGIN")}
MOD = {
    f"{SITE}/sparkpin_made-1.dist-info/METADATA": metadata("sparkpin-made", "1"),
    f"{SITE}/sparkpin_made-1.dist-info/entry_points.txt": "[vllm.general_plugins]\nmade = sparkpin_made:register\n",
}
TOUCHES = 'TOUCHES: dict = {"0.32.0": {"vllm.a:b": "self, x"}, "0.31.0": _EARLIER | {"vllm.a:c": "0.33.0"}}'


def mod(line: str) -> dict[str, str]:
    return {**MOD, f"{SITE}/sparkpin_made/hook.py": f"import vllm\n{line}\n"}


WHAT_IS_FOUND: dict[str, tuple[Mapping[str, bytes | Elf | str | None], str]] = {
    "vLLM without CUDA beside a torch with":
        ({f"{SITE}/vllm/_C.abi3.so": Elf(needed=["libc.so.6"])},
         f"torch vllm 0.33.0: vLLM 0.33.0 is built without CUDA ({SITE}/vllm/_C.abi3.so needs no CUDA library), but "
         f"torch 2.14.0+cu130 ({SITE}/torch/version.py: cuda = 13.0) is built for CUDA 13.0"),
    "built against another release of a library":
        ({f"{SITE}/torch/lib/libc10_cuda.so": Elf(soname="libc10_cuda.so", defined=["_ZN3c105otherEv"])},
         f"symbols {SITE}/vllm/_C.abi3.so: 1 undefined: _ZN3c104cuda12device_countEv"),
    "weak symbols may be missing, and those of libraries that are not needed do not count":
        ({f"{SITE}/a/weak.so": Elf(weak=["nowhere"]),
          f"{SITE}/a/far.so": Elf(needed=["libnear.so"], undefined=["deep"], runpath="$ORIGIN"),
          f"{SITE}/a/libnear.so": Elf(needed=["libdeep.so"], runpath="$ORIGIN"),
          f"{SITE}/a/libdeep.so": Elf(defined=["deep"]),
          f"{SITE}/a/alone.so": Elf(undefined=["deep"])},
         f"symbols {SITE}/a/alone.so: 1 undefined: deep"),
    "never loaded alone: what loads it brings the symbols":
        ({**NEAR, **BOTH},
         ""),
    "one of those that load it does not bring them":
        ({**NEAR, **BOTH, f"{SITE}/a/worse.so": Elf(needed=["liblapack.so"], rpath="$ORIGIN")},
         f"symbols {SITE}/a/liblapack.so: 1 undefined: blas"),
    "links in a circle":
        ({"usr/lib/libloop.so": "-> libback.so",
          "usr/lib/libback.so": "-> libloop.so",
          f"{SITE}/a.so": Elf(needed=["libloop.so"])},
         f"needed {SITE}/a.so: libloop.so is nowhere in the image; {SITE}/a.so needs it"),
    "a version that the C library does not have":
        ({f"{SITE}/new.so": Elf(needed=["libc.so.6"], versions_needed={"libc.so.6": ["GLIBC_2.38"]})},
         f"versions {SITE}/new.so: needs GLIBC_2.38 of libc.so.6, "
         "and usr/lib/aarch64-linux-gnu/libc.so.6 does not offer that"),
    "a CUDA release whose driver is not known":
        ({f"{SITE}/nvidia_cuda_runtime-13.0.96.dist-info/METADATA": metadata("nvidia-cuda-runtime", "14.0.1"),
          f"{SITE}/nvidia_cuda_nvcc-13.0.88.dist-info/METADATA": None},
         "driver CUDA 14.0: which driver CUDA 14.0 needs is not known here"),
    "a torch of another CUDA":
        ({f"{SITE}/torch/version.py": torch("2.14.0+cu128", "12.8")},
         f"torch vllm 0.33.0: vLLM 0.33.0 is built for CUDA 13 ({LIBRARY} needs libcudart.so.13), but "
         f"torch 2.14.0+cu128 ({SITE}/torch/version.py: cuda = 12.8) is built for CUDA 12.8"),
    "the raw closure of vLLM 0.33.0: compiler, headers and runtime of several CUDA releases":
        ({f"{SITE}/nvidia_cuda_nvcc-13.0.88.dist-info/METADATA": metadata("nvidia-cuda-nvcc", "13.5.70"),
          f"{SITE}/nvidia_nvvm-13.5.70.dist-info/METADATA": metadata("nvidia-nvvm", "13.5.70"),
          f"{SITE}/nvidia_cublas-13.1.0.dist-info/METADATA": metadata("nvidia-cublas", "13.1.0.3")},
         "cuda CUDA toolkit: of several CUDA releases: nvidia-cuda-nvcc 13.5.70, nvidia-cuda-runtime 13.0.96, "
         "nvidia-nvvm 13.5.70"),
    "two runtimes":
        ({f"{SITE}/nvidia_cuda_runtime_cu12-1.dist-info/METADATA": metadata("nvidia-cuda-runtime-cu12", "12.8.90")},
         "cuda CUDA toolkit: of several CUDA releases: nvidia-cuda-nvcc 13.0.88, nvidia-cuda-runtime 13.0.96, "
         "nvidia-cuda-runtime-cu12 12.8.90"),
    "two versions of one package in one folder":
        (DISTRIBUTIONS,
         f"packages typing-extensions: 2 times in /{SITE}/: versions 4.16.0, 4.15.0"),
    "a plugin of others need not say which vLLM it is made for":
        (mod(""),
         ""),
}  # fmt: skip


@pytest.mark.parametrize(("files", "wanted"), WHAT_IS_FOUND.values(), ids=WHAT_IS_FOUND)
def test_what_is_found(root: Root, files: Mapping[str, bytes | Elf | str | None], wanted: str) -> None:
    assert texts(root(files)) == ([wanted] if wanted else [])


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (mod('VLLM_VERSIONS: tuple = ("0.33.0",)'), ""),
        (mod('VLLM_VERSIONS: tuple = ["0.32.0", "0.33"]'), ""),
        (mod('VLLM_VERSIONS: tuple = ("0.32.0",)'), "sparkpin_made 1 is made for vLLM 0.32.0, the image has 0.33.0"),
        (mod('VLLM_VERSIONS: tuple = ("0.33.7",)'), "sparkpin_made 1 is made for vLLM 0.33.7, the image has 0.33.0"),
        (mod("VLLM_VERSIONS: tuple = SOMETHING"), "sparkpin_made 1 does not say which vLLM it is made for"),
        # As our mods have it: by release, a text for each function.
        (mod(TOUCHES), "sparkpin_made 1 is made for vLLM 0.31.0, 0.32.0, the image has 0.33.0"),
        ({}, "the stage has this mod, the image does not"),
    ],
)
def test_our_plugins_are_there_and_made_for_this_vllm(root: Root, files: dict[str, str], wanted: str) -> None:
    assert texts(root(files), mods=["sparkpin-made"]) == ([f"plugins sparkpin-made: {wanted}"] if wanted else [])


@pytest.mark.parametrize(("made_for", "severity"), [("0.33.7", "warning"), ("0.32.0", "error"), ("0.3.0", "error")])
def test_a_patch_release_is_left_to_the_mod_itself(root: Root, made_for: str, severity: str) -> None:
    [one] = found(root(mod(f"VLLM_VERSIONS: tuple = ({made_for!r},)")), 121, mods=["sparkpin-made"])
    assert (one.rule, one.severity) == ("plugins", severity)


def test_where_the_loader_searches(root: Root) -> None:
    """One library for each way; one that lies on none is a warning: something may load it first."""
    names = ["origin", "conf", "included", "env", "default", "linked", "nowhere", "stray"]
    files: dict[str, bytes | Elf | str | None] = {
        f"{SITE}/a/user.so": Elf(needed=[f"lib{name}.so" for name in names], runpath="${ORIGIN}/../b"),
        f"{SITE}/b/liborigin.so": Elf(),
        "etc/ld.so.conf": "include ld.so.conf.d/*.conf\n/opt/conf # why\n",
        "etc/ld.so.conf.d/x.conf": "/opt/included\n",
        "opt/conf/libconf.so": Elf(),
        "opt/included/libincluded.so": Elf(),
        "opt/env/libenv.so": Elf(),
        "usr/lib/libdefault.so": Elf(),
        "usr/lib/liblinked.so": "-> /opt/far/liblinked.so.1",
        "opt/far/liblinked.so.1": Elf(),
        "srv/libstray.so": Elf(),
        "usr/lib/libnowhere.so": Elf(machine=X86_64),
    }
    facts = root(files, env={"LD_LIBRARY_PATH": "/opt/env"})
    assert [text for text in texts(facts) if text.startswith("needed")] == [
        f"needed {SITE}/a/user.so: libnowhere.so is nowhere in the image; {SITE}/a/user.so needs it",
        f"needed {SITE}/a/user.so: {SITE}/a/user.so needs libstray.so; srv/libstray.so is on no search path",
    ]
    stray = next(one for one in found(facts) if one.what == "libstray.so")
    assert stray.severity == "warning" and "say so in sparkpin/smoke/inspect/allowed.py" in stray.next_step
    assert "not for linux/arm64: usr/lib/libnowhere.so (x86-64)" in " ".join(texts(facts))


def test_what_is_accepted_there_does_not_excuse_what_needs_it(root: Root) -> None:
    files: dict[str, bytes | Elf | str | None] = {
        f"{SITE}/a/liboptional.so": Elf(needed=["libgone.so"]),
        f"{SITE}/a/user.so": Elf(needed=["liboptional.so"], runpath="$ORIGIN"),
    }
    allowed = [
        Allowed("needed", "*/liboptional.so", r"libgone\.so", "nothing loads it"),
        Allowed("needed", "*", r"libcuda\.so\.1", "the driver"),
    ]
    assert texts(root(files), allowed=allowed) == [
        f"needed {SITE}/a/user.so: needs {SITE}/a/liboptional.so, which does not load without libgone.so: "
        "accepted there, not here"
    ]
    other = [Allowed("needed", "*/liboptional.so", r"libgone\.so", "why", package="not-here"), allowed[1]]
    assert texts(root(files), allowed=other)[0].startswith(f"needed {SITE}/a/liboptional.so: libgone.so is nowhere")


FAST = Elf(gpu=gpu((CUBIN, 90, SPECIFIC), (CUBIN, 121, PLAIN)))


@pytest.mark.parametrize(
    ("library", "entry", "sm", "told"),
    [
        (Elf(needed=["libc.so.6"]), Allowed("needed", "*/libfast.so", r"libgone\.so", "why"), 121, 1),
        (Elf(needed=["libc.so.6"]), Allowed("needed", "*/not-here.so", r".*", "why"), 121, 0),
        (FAST, Allowed("gpu", "*/libfast.so", "sm_90a", "why"), 121, 1),
        # What excuses code for another GPU may idle on that GPU.
        (FAST, Allowed("gpu", "*/libfast.so", "sm_90a", "why"), 90, 0),
    ],
)  # fmt: skip
def test_what_is_accepted_and_no_longer_lacks_is_told(
    root: Root, library: Elf, entry: Allowed, sm: int, told: int
) -> None:
    allowed = [entry, Allowed("needed", "*", r"libcuda\.so\.1", "the driver")]
    found = findings(root({f"{SITE}/a/libfast.so": library}), sm=sm, platform="linux/arm64", allowed=allowed)
    seen = [(one.severity, one.rule, one.subject) for one in found if "allowed.py" in one.text]
    assert seen == [("note", entry.rule, entry.subject)] * told


@pytest.mark.parametrize(
    ("path", "library", "seen"),
    [
        ("nvshmem/lib/nvshmem_transport_ucx.so.3", Elf(needed=["libucp.so.0"]), ""),
        ("nvshmem/lib/nvshmem_transport_ucx.so.3", Elf(needed=["libnvshmem_host.so.3"]), "libnvshmem_host.so.3 is"),
        ("torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch29-cuda.so", Elf(undefined=["_ZN3c104goneEv"]), ""),
        ("torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch29-cuda.so", Elf(undefined=["cudaGone"]), "cudaGone"),
        ("torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch214-cuda.so", Elf(undefined=["_ZN3c104goneEv"]), "c104gone"),
        ("triton/plugins/libTest.so", Elf(needed=["libgone.so"]), "libgone.so is nowhere"),
    ],
)
def test_what_is_accepted_of_a_package_excuses_no_other_lack_of_it(
    root: Root, path: str, library: Elf, seen: str
) -> None:
    told = [
        one
        for one in findings(root({f"{SITE}/{path}": library}), sm=121, platform="linux/arm64")
        if path in one.subject
    ]
    assert [one.severity for one in told] == (["error"] if seen else ["allowed"])
    assert seen in told[0].text


def test_the_newer_of_two_runtimes_asks_for_the_driver(root: Root) -> None:
    older = metadata("nvidia-cuda-runtime-cu12", "12.8.90")
    facts = root({f"{SITE}/nvidia_cuda_runtime_cu12-12.8.90.dist-info/METADATA": older})
    assert (cuda_release(facts), minimum_driver(facts)) == ("13.0", "580.65.06")


def test_a_damaged_library_and_an_image_for_another_machine(root: Root) -> None:
    damaged = root({f"{SITE}/a.so": bytes(Elf())[:-9]})
    (only,) = found(damaged)
    assert only.rule == "files" and f"{SITE}/a.so: the table of sections at bytes" in only.text
    other = findings(damaged, sm=None, platform="linux/amd64")
    assert "no library or program in it is for linux/amd64" in [one.text for one in other]

"""What a server says where CUDA's driver is missing, or refuses: the bindings are real, there is no GPU behind them."""

from __future__ import annotations

import ctypes

import pytest
from cuda.bindings import driver as cuda
from sparkpin_turboquant import driver, kernel

ACCESS = kernel.Access(64, 4)


@pytest.fixture
def cubin(architecture: int) -> bytes:
    return kernel.cubin_of(ACCESS, architecture)


def test_no_driver(cubin: bytes, architecture: int) -> None:
    with pytest.raises(
        RuntimeError, match=rf"(?s)turboquant: .*driver.* to load cache\.cu for sm_{architecture}; expected"
    ):
        driver.Loaded(ACCESS, cubin)


@pytest.mark.parametrize("error", ["CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE"])
def test_a_cubin_that_the_driver_refuses(
    cubin: bytes, architecture: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers come from a GPU in tests/on_gpu; here they are what the driver's manual says they are."""
    monkeypatch.setattr(cuda, "cuModuleLoadData", lambda image: (getattr(cuda.CUresult, error), None))
    said = rf"turboquant: CUDA's driver says {error}; it was to load cache\.cu for "
    with pytest.raises(RuntimeError, match=rf"{said}sm_{architecture}; expected a driver for CUDA 13 and an image"):
        driver.Loaded(ACCESS, cubin)
    with pytest.raises(RuntimeError, match=rf"{said}no GPU, as it is no cubin; "):
        driver.Loaded(ACCESS, b"")


class Accepting:
    """A GPU that takes all but launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, int] = {}
        done = cuda.CUresult.CUDA_SUCCESS
        monkeypatch.setattr(cuda, "cuModuleLoadData", lambda image: (done, "module"))
        monkeypatch.setattr(cuda, "cuModuleGetFunction", lambda module, name: (done, name.decode()))
        monkeypatch.setattr(cuda, "cuFuncSetAttribute", lambda function, _, size: (self.ask(function, size),))
        monkeypatch.setattr(cuda, "cuLaunchKernelEx", lambda *x: (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,))

    def ask(self, function: str, size: int) -> cuda.CUresult:
        self.asked[function] = size
        return cuda.CUresult.CUDA_SUCCESS


def test_a_launch_that_fails_names_the_kernel(cubin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Accepting(monkeypatch)
    loaded = driver.Loaded(ACCESS, cubin)
    assert gpu.asked == ACCESS.functions  # more shared memory than 48 KiB has to be asked for
    launch = ACCESS.by_rows("turn", 10)
    said = r"turboquant: CUDA's driver says CUDA_ERROR_INVALID_VALUE to Launch\(function='turn', grid=\(3, 1, 1\)"
    with pytest.raises(RuntimeError, match=said):
        loaded.launch(launch, ctypes.c_int(0), 0, overlap=True)

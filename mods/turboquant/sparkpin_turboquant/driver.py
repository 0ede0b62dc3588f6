"""Cubins on a GPU: loaded and launched through CUDA's driver, whose bindings come with PyTorch for CUDA."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from sparkpin_modkit import kernels

from sparkpin_turboquant.kernel import Compiled, Launch, cubin_of


class Loaded:
    """A cubin on the current GPU. Raises RuntimeError where there is no driver, or it refuses the cubin."""

    def __init__(self, compiled: Compiled, cubin: bytes) -> None:
        from cuda.bindings import driver

        self.driver = driver
        try:
            self.module = _driver(driver.cuModuleLoadData(cubin))
            self.functions = {name: self._function(name, size) for name, size in compiled.functions.items()}
        except RuntimeError as error:
            raise RuntimeError(
                f"turboquant: {error}; it was to load {compiled.file}.cu for {target_of(cubin)}; expected a driver for "
                "CUDA 13 and an image that was built for this GPU"
            ) from error
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        self.overlap = overlap

    def _function(self, name: str, shared_bytes: int) -> Any:
        function = _driver(self.driver.cuModuleGetFunction(self.module, name.encode()))
        attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _driver(self.driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return function

    def launch(self, launch: Launch, args: ctypes.Structure, stream: int, overlap: bool = False) -> None:
        """overlap: the GPU may start it before the kernel before it has ended (from 9.0 on)."""
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = self.driver.CUstream(stream)
        if overlap:
            config.attrs, config.numAttrs = [self.overlap], 1
        try:
            _driver(self.driver.cuLaunchKernelEx(config, self.functions[launch.function], ctypes.addressof(pointer), 0))
        except RuntimeError as error:
            raise RuntimeError(f"turboquant: {error} to {launch}") from error


def target_of(cubin: bytes) -> str:
    """sm_121 for compute capability 12.1."""
    try:
        return f"sm_{kernels.architecture_of(cubin)}"
    except ValueError as error:
        return f"no GPU, as it is {error}"


def _driver(result: Any) -> Any:
    """What a call of the driver gives besides its error. Raises RuntimeError for an error."""
    error, *rest = result
    if int(error):
        raise RuntimeError(f"CUDA's driver says {error.name}")
    return rest[0] if rest else None


@cache
def loaded(compiled: Compiled, device: int) -> Loaded:
    """On the GPU of this number, which is the current one."""
    import torch

    torch.empty(1, device=f"cuda:{device}")  # the driver wants a context, which PyTorch makes with its first tensor
    major, minor = torch.cuda.get_device_capability(device)
    return Loaded(compiled, cubin_of(compiled, major * 10 + minor))


def stream_of(device: Any) -> int:
    """The current stream of a ``torch.device``."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)

"""A release in a container: what `serve` and the smoke test have in common.

Both run an image as user 10001 without capabilities, on a read-only root, with the checkpoint mounted read-only.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkpin.core.errors import CheckpointError, EngineError, HostError, IntegrityError
from sparkpin.core.terminal import Say
from sparkpin.host.containers import APIError, Container, DeviceRequest, LogConfig, Ulimit
from sparkpin.host.engine import Engine
from sparkpin.pins.vllm_command import MODEL_PATH
from sparkpin.releases import compile_caches
from sparkpin.releases.record import Release

UID = 10001
NETWORK = "sparkpin"
CONFLICT = 409  # Docker's word for a name that is taken, and for a container that does not run
CACHE_LABEL = "sparkpin.cache"
HOME_LABEL = "sparkpin.home"  # its value is the SPARKPIN_HOME whose release is served
HOME = compile_caches.HOME
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HOME": HOME, **compile_caches.ENV}
GIB = 1 << 30
TMPFS_BYTES = 2 * GIB
LAST_LINES = 12

# What vLLM's log says as it starts, in the order in which it says it; the first group goes into the text.
STARTUP = (
    (r"\bversion (\d+\.\d+\S*)\s*$", "vLLM {} reads its configuration"),
    (r"Resolved architecture: (\S+)", "the model is a {}"),
    (r"Initializing a V1 LLM engine", "starting the engine"),
    (r"Starting to load model", "loading weights"),
    (r"Loading weights took ([\d.]+)", "weights loaded in {} s"),
    (r"torch\.compile takes ([\d.]+)", "compiled in {} s"),
    (r"KV cache size: ([\d,]+) tokens", "room for {} tokens in the cache"),
    (r"Graph capturing finished in ([\d.]+)", "CUDA graphs captured in {} s"),
    (r"init engine .* took ([\d.]+)", "engine ready after {} s"),
    (r"Application startup complete", "answering"),
)


def require_image(engine: Engine, release: Release) -> None:
    """The release's tag must still name the image that was recorded."""
    info = engine.image(release.tag)
    if info is None:
        raise EngineError(
            f"the engine has no image {release.tag}",
            next_step=f"invoke rebuild {release.tag}",
        )
    if info.config_digest != release.image:
        raise IntegrityError(
            f"{release.tag} names another image: wanted {release.image}, got {info.config_digest}",
            next_step=f"invoke rebuild {release.tag}",
        )


def require_here(engine: Engine) -> None:
    """HostError for an engine on another machine, which has none of the folders that a container is given."""
    if engine.elsewhere:
        raise HostError(
            f"the engine runs on {engine.elsewhere}, and what a container is given lies in folders of this machine",
            next_step="unset DOCKER_HOST (or docker context use default), or export the release and import it there",
        )


def cache_volume(engine: Engine, release: Release) -> str:
    """The volume that keeps an image's own caches (inspected models, compiled kernels) from start to start.

    One a build key: what another vLLM has written is never read. The label is what `prune` goes by.
    """
    name = compile_caches.volume_name(release.build_key)
    engine.client.volumes.create(name, labels={CACHE_LABEL: release.image})
    return name


def network(engine: Engine) -> str:
    """The network of the fronts (`serve/front`), and of nothing else. Ports are published from it. Containers in it do
    not reach each other; the host, and by UDP more, they would reach if the front did not close itself in.

    It also does not hang on the engine's default bridge, which a second engine on the machine takes away.
    """
    options = {
        "com.docker.network.bridge.enable_ip_masquerade": "false",
        "com.docker.network.bridge.enable_icc": "false",
    }
    if not engine.client.networks.list(names=[f"^{NETWORK}$"]):
        labels = {"sparkpin.network": "serve"}
        try:
            engine.client.networks.create(
                NETWORK, driver="bridge", check_duplicate=True, options=options, labels=labels
            )
        except APIError as error:
            if error.status_code != CONFLICT:  # another home has just made it
                raise
    return NETWORK


def sandbox(env: Mapping[str, str], *, memory: int | None) -> dict[str, Any]:
    """Keyword arguments of the SDK's `containers.create` that close a container in, whatever it runs.

    memory: limit in bytes, swap included; None for none.
    """
    settings: dict[str, Any] = {
        "environment": {**ENV, **env},
        "user": f"{UID}:{UID}",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,size={TMPFS_BYTES},mode=1777"},  # exec: compiled kernels load from it
        "pids_limit": 4096,
        "working_dir": HOME,
    }
    if memory is not None:
        settings |= {"mem_limit": memory, "memswap_limit": memory}
    return settings


def apart(container_settings: dict[str, Any]) -> dict[str, Any]:
    """For a container that nobody outside asks: no network, and a log that the engine keeps."""
    return container_settings | {"network_mode": "none", "log_config": kept_log("50m")}


def kept_log(size: str) -> LogConfig:
    """Three files of that size at most."""
    return LogConfig(type=LogConfig.types.JSON, config={"max-size": size, "max-file": "3"})


def options(release: Release, checkpoint: Path, *, memory: int | None, gpus: bool, cache: str) -> dict[str, Any]:
    """Keyword arguments of the SDK's `containers.create` that do not depend on who runs it.

    Args:
        memory: limit in bytes, swap included; None on machines whose GPU shares the memory.
        cache: name of a volume for the user's home; a new one takes its owner from the image's own folder.
    """
    settings = sandbox(release.env, memory=memory) | {
        "volumes": {
            str(checkpoint.absolute()): {"bind": MODEL_PATH, "mode": "ro"},
            cache: {"bind": HOME, "mode": "rw"},
        },
        "stop_signal": "SIGINT",
    }
    if gpus:
        settings |= {
            "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])],
            "shm_size": 16 * GIB,
            "ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)],
        }
    return settings


def memory_limit(engine: Engine, checkpoint: Path) -> int:
    """Bytes for a server without a GPU: weights twice (read and repacked), the cache and the libraries."""
    total = int(engine.client.info()["MemTotal"])
    return min(2 * folder_size(checkpoint) + 8 * GIB, int(total * 0.9))


def ready_timeout(checkpoint: Path) -> float:
    """Seconds that a start-up may take: imports and compilation (165 were seen on two slow cores with other work), and
    a slow disk's time for the weights."""
    return 600 + folder_size(checkpoint) / 50e6


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def require_readable(checkpoint: Path) -> None:
    """The container's user is nobody in particular on the host: everyone must be able to read the checkpoint."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"no checkpoint at {checkpoint}", next_step="invoke checkpoint")
    for file in (checkpoint, *sorted(checkpoint.iterdir())):
        mode = file.stat().st_mode
        wanted = stat.S_IROTH | (stat.S_IXOTH if file.is_dir() else 0)
        if mode & wanted != wanted:
            raise CheckpointError(
                f"{file}: mode {stat.S_IMODE(mode):o} keeps the container's user {UID} from reading it",
                next_step=f"chmod -R a+rX {checkpoint}",
            )


def log_of(container: Container) -> bytes:
    """Everything that the container has written so far, standard output and error in order."""
    return bytes(container.logs(stdout=True, stderr=True))


def last_lines(log: bytes, count: int = LAST_LINES) -> str:
    return "\n".join(log.decode(errors="replace").rstrip().splitlines()[-count:])


def exit_reason(container: Container) -> str | None:
    """Why the container does not run any more; None while it runs."""
    container.reload()
    state = container.attrs["State"]
    return None if state["Status"] in ("created", "running") else end_of(state)


def end_of(state: Mapping[str, Any]) -> str:
    """state: of a container that has ended, as Docker describes it."""
    reason = f"exited with {state['ExitCode']}"
    if state.get("OOMKilled"):
        reason += ", killed for want of memory"
    return reason + (f" ({state['Error']})" if state.get("Error") else "")


class StartProgress:
    """Tells each step of vLLM's start-up once, as its log shows it."""

    def __init__(self, say: Say) -> None:
        self._say, self._told, self._read = say, 0, 0

    def update(self, log: bytes) -> bool:
        """Whether there was something new to tell."""
        before, cut = self._told, log.rfind(b"\n") + 1
        fresh = log[self._read : cut].decode(errors="replace")
        self._read = max(self._read, cut)
        for line in fresh.splitlines():
            for index, (pattern, text) in enumerate(STARTUP[self._told :], start=self._told + 1):
                if found := re.search(pattern, line):
                    self._told = index
                    self._say(text.format(*found.groups()))
                    break
        return self._told > before

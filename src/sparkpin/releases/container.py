"""A release in a container: what `serve` and the smoke test have in common.

Both run an image as user 10001 without capabilities, on a read-only root, with the checkpoint mounted read-only.
"""

from __future__ import annotations

import contextlib
import io
import json
import stat
import tarfile
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.core.errors import CheckpointError, EngineError, HostError, IntegrityError, SparkpinError
from sparkpin.host.containers import APIError, Container, DeviceRequest, LogConfig, Ulimit
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.machine import HOST_RESERVE
from sparkpin.pins.nodes import STORE_PORT, NodeRank, env_at, nodes_of, words_at
from sparkpin.pins.vllm_flags import MODEL_PATH, drop_flags, set_flag
from sparkpin.releases import compile_caches, inside
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
PYTHON = ("python", "-IS")  # nothing of the image's packages: quick to start, and not theirs to change
EXECUTE_SECONDS = 40
"""The longest step of several machines. NCCL does not say that a node is gone: the limit does, and its own 300 s are
more than process 1 waits until it ends a server that hangs (`serve.launch.FAILURES`)."""
RDMA = "/dev/infiniband"
DROPPED = ("--host", "--port", "--disable-log-stats")
"""Of a release's command: it has a socket; and a busy server is known from one that hangs by its counters."""


def require_image(engine: Engine, release: Release) -> None:
    """The release's tag must still name the image that was recorded."""
    info = engine.image(release.tag)
    if info is None:
        raise EngineError(
            f"the engine has no image {release.tag}",
            next_step=f"invoke reproduce {release.tag} --keep",
        )
    if info.config_digest != release.image:
        raise IntegrityError(
            f"{release.tag} names another image: expected {release.image}, got {info.config_digest}",
            next_step=f"invoke reproduce {release.tag} --keep",
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
    """The network of the proxies (`serve/proxy`), and of nothing else. Ports are published from it. Containers in it do
    not reach each other by TCP. They do reach the host.

    It also does not hang on the engine's default bridge, which a second engine on the machine takes away.
    """
    options = {
        "com.docker.network.bridge.enable_ip_masquerade": "false",
        "com.docker.network.bridge.enable_icc": "false",
    }
    labels = {"sparkpin.network": "serve"}
    try:
        engine.client.networks.create(NETWORK, driver="bridge", check_duplicate=True, options=options, labels=labels)
    except APIError as error:
        if error.status_code != CONFLICT:  # it is there
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


@dataclass(frozen=True)
class Node:
    """The container of one machine, of a release for several.

    place: which of them it is, and its addresses.
    network: "host"; or for nodes on one machine "none", and "container:ID" for those that share the network of another.
    gpu: the one that it gets, as nvidia-smi counts; None: all.
    rdma: it gets the devices of the machine's InfiniBand or RoCE adapters.
    """

    place: NodeRank
    network: str = "host"
    gpu: int | None = None
    rdma: bool = False


def at_node(settings: dict[str, Any], node: Node, *, gpus: bool) -> dict[str, Any]:
    """What `options` gave, for one of several machines: its network, its variables and its devices are its own."""
    env = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(EXECUTE_SECONDS)} | settings["environment"] | env_at(node.place)
    found = settings | {"environment": env, "network_mode": node.network}
    if not gpus:
        found["shm_size"] = GIB
    elif node.place.on_one_host:  # containers share neither /dev/shm nor processes: NCCL is to speak as over a link
        env |= dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1")
        env["NCCL_HOSTID"] = f"node{node.place.rank}"
    if gpus and node.gpu is not None:
        found["device_requests"] = [DeviceRequest(device_ids=[str(node.gpu)], capabilities=[["gpu"]])]
    if node.rdma:  # it registers memory, which has to stay where it is
        found |= {"devices": [f"{RDMA}:{RDMA}:rwm"], "ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)]}
    return found


def process_one(node: Node | None, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Files of `inside`. settings: as that reads them, without what a node adds."""
    if node:
        settings = {**settings, "rank": node.place.rank, "store": (node.place.head, STORE_PORT)}
    program = Path(inside.__file__).read_bytes()
    return {"inside.py": program, inside.SETTINGS: json.dumps(settings).encode()}


def floor_of(gpus: bool) -> int:
    """Bytes of the machine's memory below which process 1 ends the server. Without a GPU the container's limit does."""
    return HOST_RESERVE if gpus else 0


def require_one_node(release: Release) -> None:
    """HostError for a release that one container cannot serve."""
    if (nodes := nodes_of(release.argv)) > 1:
        raise HostError(
            f"{release.tag} is for {nodes} machines, and this command starts a server on one",
            next_step="invoke serve --nodes names them (docs/nodes.md)",
        )


def put(
    container: Container,
    folder: str,
    files: Mapping[str, bytes],
    *,
    secret: Set[str] = frozenset(),
    owned: tuple[str, ...] = (),
) -> None:
    """Files for a folder that is a volume, whether the container runs or not.

    Everybody can read them, the secret ones the container's user alone. owned: folders that are that user's.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in owned:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, 0o700, UID, UID
            tar.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o400 if name in secret else 0o444
            member.uid = member.gid = UID if name in secret else 0
            tar.addfile(member, io.BytesIO(data))
    with engine_errors():
        if not container.put_archive(folder, buffer.getvalue()):
            raise EngineError(f"the engine did not take the files of {container.name}", next_step="invoke doctor")


def options(release: Release, checkpoint: Path | str, *, memory: int | None, gpus: bool, cache: str) -> dict[str, Any]:
    """Keyword arguments of the SDK's `containers.create` that do not depend on who runs it.

    Args:
        checkpoint: its folder on the engine's machine.
        memory: limit in bytes, swap included; None for none.
        cache: name of a volume for the user's home; a new one takes its owner from the image's own folder.
    """
    # What modkit compares between ranks.
    compared = {"SPARKPIN_RELEASE": release.key} if nodes_of(release.argv) > 1 else {}
    settings = sandbox({**compared, **release.env}, memory=memory) | {
        "volumes": {
            str(Path(checkpoint).absolute()): {"bind": MODEL_PATH, "mode": "ro"},
            cache: {"bind": HOME, "mode": "rw"},
        },
        "stop_signal": "SIGINT",
    }
    return settings | all_gpus() if gpus else settings


def server_settings(
    engine: Engine,
    release: Release,
    checkpoint: Path | str,
    socket: str,
    node: Node | None,
    compilers: int | None,
    **limits: Any,
) -> dict[str, Any]:
    """Keyword arguments of the SDK's `containers.create` for a server: the same for `serve` and for what tests it.

    socket: where it listens. compilers: how many a first start may run at a time, unless the release says so itself
    (MAX_JOBS); None: as it comes. limits: memory and gpus, as of `options`. It gets no key: who may ask is decided
    before it (`serve.proxy`), and it has no network that others could come by. A node has one, for its peers.
    """
    settings = apart(options(release, checkpoint, cache=cache_volume(engine, release), **limits))
    if compilers is not None:
        settings["environment"].setdefault("MAX_JOBS", str(compilers))
    settings["environment"].pop("VLLM_API_KEY", None)  # the proxy, which has the key, sends none on
    settings["environment"]["FORWARDED_ALLOW_IPS"] = "*"  # the proxy's word tells clients from health checks
    argv = set_flag(drop_flags(release.argv, *DROPPED), "--uds", socket)
    if node is None:
        return settings | {"command": argv}
    return at_node(settings, node, gpus=limits["gpus"]) | {"command": words_at(argv, node.place)}


def all_gpus() -> dict[str, Any]:
    """What `sandbox` lacks for a container that computes on the machine's GPUs."""
    return {
        "device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])],
        "shm_size": 16 * GIB,
        "ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)],
    }


def ready_timeout(checkpoint: Path) -> float:
    """Seconds that a start-up may take: imports and compilation (165 were seen on two slow cores with other work), and
    a slow disk's time for the weights."""
    return 600 + folder_size(checkpoint) / 50e6


def folder_size(folder: Path) -> int:
    """Of all files in it; those of a drafter lie in a folder of their own."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def require_readable(checkpoint: Path) -> None:
    """The container's user is nobody in particular on the host: everyone must be able to read the checkpoint."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"no checkpoint at {checkpoint}", next_step="invoke build --checkpoint-only")
    for file in (checkpoint, *sorted(checkpoint.rglob("*"))):
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
    """As `how_ended`, asked now."""
    container.reload()
    return how_ended(container)


def how_ended(container: Container) -> str | None:
    """Why a container does not run, as Docker described it last; None while it does, or Docker starts it again."""
    state = container.attrs["State"]
    if state["Status"] in ("created", "running", "restarting", "paused"):
        return None
    if not state["ExitCode"]:
        return "failed too often and stays down" if stays_down(container) else "was stopped"
    reason = f"exited with {state['ExitCode']}"
    if state.get("OOMKilled"):
        reason += ", killed because memory ran out"
    return reason + (f" ({state['Error']})" if state.get("Error") else "")


def stays_down(container: Container) -> bool:
    """Whether process 1 has given up: its last line says so."""
    with contextlib.suppress(SparkpinError), engine_errors():
        return f"sparkpin: {inside.STAYS_DOWN}".encode() in bytes(container.logs(tail=1))
    return False

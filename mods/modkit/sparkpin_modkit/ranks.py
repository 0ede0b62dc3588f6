"""Ranks of one server must agree before they serve: the same release, checkpoint, vLLM, mods and switches.

A rank of another image or switch would put other numbers into the same sums, without any error. So each rank tells the
others what it has, over the group of processes that vLLM has already made: first when that group is there, before
minutes of loading, then which mods are in use, when all is loaded and the cache is made. A difference stops each rank.
A server of one process is left alone. May go when vLLM compares its ranks itself.

torch's store, by which the ranks of several machines find each other, asks nobody for a key, and listens on every
address. Where the launcher names one, it listens there alone. May go when torch listens where it is told.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from sparkpin_modkit.checks import check_vllm
from sparkpin_modkit.errors import EXIT_CODE, RanksDiffer, UnsupportedVLLM
from sparkpin_modkit.reports import in_use, report, reporting_failure
from sparkpin_modkit.touches import TOUCHES

RELEASE = "SPARKPIN_RELEASE"
"""The variable in which a launcher gives the release's key to each rank."""
STORE = "SPARKPIN_STORE"
"""The variable in which a launcher gives rank 0, of one process for each machine, ADDRESS:PORT of torch's store."""
MOD, VERSION = "modkit", "0.1.0"
WHERE = "where"
ROOM = 65_536
"""Bytes that a rank says: JSON, filled up with spaces, so that nothing of another's length is believed."""
PATIENCE = timedelta(minutes=5)
"""For the first exchange: the ranks have just met. One whose image has no mods never comes."""

_here: dict[str, tuple[str, Callable[[], None]] | None] = {}


def take_part(mod: str, version: str, install: Callable[[], None] | None) -> None:
    """Let this process speak of `mod`; install: any function of its package, None where it is switched off."""
    _here[mod] = (version, install) if install else None
    _wrap()


@functools.cache
def _wrap() -> None:
    try:
        check_vllm(TOUCHES)
    except UnsupportedVLLM:
        return  # a mod that is on has refused it
    from vllm.distributed.parallel_state import get_tp_group, get_world_group
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    init_device, initialize = WorkerWrapperBase.init_device, WorkerWrapperBase.initialize_from_config

    @functools.wraps(init_device)
    def first(self: Any) -> None:
        store = own_store(os.environ.get(STORE, ""))
        init_device(self)
        del store  # torch's own has its server by now
        with _ending():
            agree(lambda: facts(Path(self.vllm_config.model_config.model)), get_world_group(), meet=True)

    @functools.wraps(initialize)
    def last(self: Any, kv_cache_configs: Any) -> None:
        initialize(self, kv_cache_configs)
        with _ending():
            # Not all ranks: of a pipeline's stages only the last has an LM head and a drafter.
            agree(lambda: {f"{mod} in use": version for mod, version in in_use().items()}, get_tp_group())

    WorkerWrapperBase.init_device, WorkerWrapperBase.initialize_from_config = first, last


def own_store(place: str) -> Any:
    """The server of torch's store, at ADDRESS:PORT and nowhere else: torch takes one that its process has at that port.
    None for no place; OSError where it is taken, or no address of this host."""
    if not place:
        return None
    from torch.distributed import TCPStore

    address, port = place.rsplit(":", 1)
    listener = socket.create_server((address, int(port)))
    return TCPStore(
        address,
        int(port),
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


@contextmanager
def _ending() -> Iterator[None]:
    """`SystemExit` ends the process: a worker that only reports an exception waits for its next call for ever."""
    try:
        with reporting_failure(MOD, version=VERSION):
            yield
    except RanksDiffer as error:
        raise SystemExit(EXIT_CODE) from error


def facts(model: Path) -> dict[str, str]:
    """What must be the same everywhere before a model is loaded. model: its folder."""
    import vllm

    record = model / "sparkpin.json"
    key = hashlib.sha256(record.read_bytes()).hexdigest()[:16] if record.is_file() else "no sparkpin.json"
    switches = {name: value for name, value in os.environ.items() if name.startswith("SPARKPIN_MOD_")}
    return {
        RELEASE: os.environ.get(RELEASE, "unset"),
        "checkpoint": key,
        "vLLM": str(vllm.__version__),
        MOD: f"{VERSION} {content(take_part)}",
        **{mod: f"{of[0]} {content(of[1])}" if of else "off" for mod, of in _here.items()},
        **switches,
    }


def agree(say: Callable[[], Mapping[str, str]], group: Any, meet: bool = False) -> None:
    """Exchange what `say` gives with the ranks of one of vLLM's groups. A group of one does nothing.

    meet: wait no longer than PATIENCE for the others, and name those that do not come.

    Raises:
        RanksDiffer: naming each difference with both sides.
    """
    if group.world_size == 1:
        return
    where = os.environ.get("VLLM_HOST_IP") or os.uname().nodename
    everyone = exchange({WHERE: where, **say()}, group.cpu_group, group.world_size, meet)
    names = [f"rank {rank} ({one.pop(WHERE, '?')})" for rank, one in zip(group.ranks, everyone, strict=True)]
    if found := differences(dict(zip(names, everyone, strict=True))):
        raise RanksDiffer(
            f"the ranks of this server differ, so none serves: {'; '.join(found)}. Wanted one release, with the same "
            "image, checkpoint and SPARKPIN_MOD_* variables, on every node"
        )
    report(MOD, "agreed", version=VERSION, ranks=group.world_size, on=sorted(everyone[0]))


def exchange(said: Mapping[str, str], group: Any, size: int, meet: bool) -> list[dict[str, str]]:
    """What each rank of a gloo group says, in their order. JSON and no pickle: the others are not to run code here."""
    import torch
    from torch import distributed

    data = json.dumps(said).encode()
    if len(data) > ROOM:
        raise RanksDiffer(f"this rank has {len(data)} bytes of facts, expected at most {ROOM}")
    try:
        if meet:
            distributed.monitored_barrier(group, PATIENCE, wait_all_ranks=True)
        rows = [torch.empty(ROOM, dtype=torch.uint8, device="cpu") for _ in range(size)]
        own = torch.frombuffer(bytearray(data.ljust(ROOM)), dtype=torch.uint8)
        distributed.all_gather(rows, own, group=group)
    except RuntimeError as error:
        raise RanksDiffer(
            f"the ranks did not meet: {error}. Wanted each to run the same image: one without sparkpin's mods never "
            "comes here"
        ) from error
    return [json.loads(row.numpy().tobytes()) for row in rows]


def differences(said: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A text for each key whose values are not the same for all: which ranks have which. said: by a rank's name."""
    found = []
    for key in sorted({key for one in said.values() for key in one}):
        values: dict[str, list[str]] = {}
        for name, one in said.items():
            values.setdefault(one.get(key, "nothing"), []).append(name)
        if len(values) > 1:
            sides = ", ".join(f"{' and '.join(names)}: {value}" for value, names in values.items())
            found.append(f"{key} ({sides})")
    return found


def content(member: Callable[..., Any]) -> str:
    """Eight digits of the hash of a package's files: a version alone may stay while they change."""
    file = sys.modules[member.__module__.partition(".")[0]].__file__
    assert file is not None
    folder = Path(file).parent
    sums = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        sums.update(f"{path.relative_to(folder)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return sums.hexdigest()[:8]

"""A second Docker engine, which lives as long as a block of this program.

It gets PID and mount namespaces of its own. When their first process ends, the kernel ends the engine with all its
containers and mounts; so nothing is left to be looked for, however this program ends. Its network namespace is its own,
too: in a shared one it would take away the first engine's docker0, with a bridge to replace it by its own, and with
the bridge "none" as well, which removes what it takes for left over.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkpin.host.daemon import spawn, wait_for_engine
from sparkpin.host.engine import Engine
from sparkpin.host.machine import require_program

NAMESPACES = ("unshare", "--fork", "--pid", "--mount-proc", "--propagation", "slave")
# The first process: it ends with the engine, or when its input does, the other end of which this program has.
FIRST = ("bash", "-c", 'exec 3<&0; "$@" <&- & cat <&3 >/dev/null & wait -n', "engine")


@contextlib.contextmanager
def private_engine(
    folder: Path,
    data_root: Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    enter: Sequence[str] = ("unshare", "--net"),
) -> Iterator[Engine]:
    """Everything of it lies below `folder`, which must be short: a socket's path has 107 bytes. What is there of an
    earlier one is used again.

    data_root: for its images, where that is another; settings: more of its configuration file; enter: the command that
    gives it its network.
    """
    folder, url = folder.resolve(), f"unix://{folder.resolve() / 'docker.sock'}"
    pidfile, configuration, log = folder / "docker.pid", folder / "daemon.json", folder / "dockerd.log"
    configured = {
        "hosts": [url],
        "data-root": str(data_root or folder / "data"),
        "exec-root": str(folder / "exec"),
        "pidfile": str(pidfile),
        "bridge": "none",
        "iptables": False,
        "ip-forward": False,
        "ip-masq": False,
    }
    configuration.write_text(json.dumps({**configured, **(settings or {})}))
    # The numbers in these pid files are others' now, and dockerd would wait for them.
    pidfile.unlink(missing_ok=True)
    shutil.rmtree(folder / "exec", ignore_errors=True)
    dockerd = require_program("dockerd", package="docker.io")
    argv = [*enter, *NAMESPACES, *FIRST, dockerd, f"--config-file={configuration}"]
    process = spawn(argv, log, stdin=subprocess.PIPE)
    assert process.stdin
    try:
        wait_for_engine(process, url, log)
        engine = Engine.at(url)
        with contextlib.closing(engine.client):
            yield engine
    finally:
        process.stdin.close()
        process.wait()

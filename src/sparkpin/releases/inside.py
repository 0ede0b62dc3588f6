"""Runs in a served container, with the image's Python and the standard library alone.

usage: inside.py run ARGV...   process 1: starts the server, passes signals on, ends with a code that Docker understands
       inside.py health        Docker's HEALTHCHECK: one real request; the last failure allowed ends the server
       inside.py ask           one real request that counts for nothing
       inside.py load          prints how many requests are under way

Why process 1 is not vLLM itself: vLLM ends with 0 when its engine process dies, and Docker's policy "on-failure" then
leaves it down. Docker does not restart a container that is unhealthy, either; and no signal that a process of the
container sends, SIGKILL included, ends process 1 unless that handles it, so a vLLM that hangs would stay.

Docker starts the container again as often as it ends with a failure. How often that may be, process 1 counts, in a file
that outlives it; where it may not be once more, it ends with 0. A count of Docker's is never filled up again. Process 1
could start vLLM anew by itself, but would have to clean up after it what a new container does not have: /tmp, shared
memory, the state of the health check.

Of a release for several machines, each container watches the other end of torch's store, and ends when that has gone:
Docker starts both again, and vLLM joins them. vLLM 0.32 and 0.33 would not: a worker whose head is gone waits for its
next step for ever, and a head learns of its worker at the next request. A worker has no API: it is well while its
server lives. Docker has to start it after a boot, whatever its exit code, so at its limit it waits without a server.

A GPU that shares the machine's memory takes its own past the container's limit, and the machine freezes before its
kernel kills anybody. So process 1 looks at the memory of the machine, and ends the server where less than `floor` bytes
of it are left, whoever took them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETTINGS = "settings.json"
RESTARTS = HERE / "state/restarts"  # their number, since the last time that all were there again
STATE = Path("/tmp/sparkpin")  # a tmpfs: empty again at each start
HUNG, UNASKED, PEER_LOST, NO_RESERVE, OUT_OF_MEMORY = 70, 71, 72, 73, 137
"""Exit codes. 71: ended with 0 though nobody asked; 72: a worker of the pair has gone; 73: the machine had too little
memory left, 137: its limit had none."""
STAYS_DOWN = "stays down"  # how the last line of the log begins then
METRICS_SECONDS = 5.0
LOOK_SECONDS = 1  # between two looks for the other machines
GUARD_SECONDS = 0.25  # between two looks at the machine's memory, which a server may take gigabytes of in a second
MEMINFO = Path("/proc/meminfo")  # proc(5): of the machine, in a container, too
PROMPT = "The sky is blue and the grass is"  # one token alone ends vLLM 0.32's engine on a CPU (causal_conv1d)
BEGUN = "starting the server"  # divides the log into lives: Docker keeps one log over all restarts
ALIVE = re.compile("vllm:(generation_tokens_total|prompt_tokens_total|kv_cache_usage_perc|iteration_tokens_total_sum)")
"""Metrics of vLLM that its engine moves whenever it computes."""
EVENTS = (  # where the kernel counts what it killed for want of memory: cgroup 2, cgroup 1
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # proc(5), 01: established; torch's sockets are in the second


def say(text: str) -> None:
    print(f"sparkpin: {text}", flush=True)


def run(argv: Sequence[str]) -> int:
    """Start the server and wait for its end; the exit code of the container."""
    STATE.mkdir(mode=0o700, exist_ok=True)
    (STATE / "started").write_text(str(time.monotonic()))
    server: subprocess.Popen[bytes] | None = None
    causes: list[int] = []  # exit codes of what ended it; 0: it was asked to
    over = threading.Event()
    known: set[str] = set()  # connections of all machines to torch's store

    def stop(number: int, _: object) -> None:
        if server is None:
            sys.exit(0)
        causes.append(0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, number)  # `send_signal` might reap it, which is `reap`'s

    def end(code: int, why: str) -> None:
        say(f"ended: {why}")
        causes.append(code)
        kill_others()

    def look(*_: object) -> None:
        now = connections(settings["store"])
        gone = {one[:8] for one in known} - {one[:8] for one in known & now}  # who came again meanwhile has gone, too
        if gone and not causes:
            end(PEER_LOST, "a worker has gone from torch's store, here or on another machine")
        known.update(now)

    def guard() -> None:
        while not over.wait(GUARD_SECONDS):
            if (left := available()) < settings["floor"]:
                kept = f"{settings['floor'] >> 20} MiB are kept for it"
                end(NO_RESERVE, f"the machine had {left >> 20} MiB of memory left, and {kept}")
                return

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    settings = load_settings()
    write_restarts(restarts() + 1 if RESTARTS.exists() else 0)
    Path(settings["socket"]).unlink(missing_ok=True)  # of its last life
    say(BEGUN)
    server = subprocess.Popen(argv)
    signal.signal(signal.SIGUSR1, lambda *_: end(HUNG, "it answered no request any more"))
    if settings.get("floor"):
        threading.Thread(target=guard, daemon=True).start()
    if "store" in settings:
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    code = reap(server.pid)
    over.set()
    signal.setitimer(signal.ITIMER_REAL, 0)
    kill_others()
    code = outcome(code, causes)
    if code and restarts() >= (allowed := load_settings()["restarts"]):
        say(f"{STAYS_DOWN}: it has been started again {allowed} times")
        (STATE / "down").touch()
        while settings.get("rank") and 0 not in causes:
            time.sleep(1)
        return 0
    return code


def kill_others() -> None:
    """Every process of the container but this one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def available() -> int:
    """Bytes that a new program could have on this machine, as the kernel estimates it."""
    return 1024 * int(MEMINFO.read_text().partition("MemAvailable:")[2].split()[0])


def connections(store: Sequence[Any]) -> set[str]:
    """Those of workers to torch's store, each as the kernel writes the worker's end: of the others on rank 0, of this
    machine elsewhere. A worker of vLLM keeps its own for as long as it lives.

    store: its IPv4 address and port. Nodes of one machine have that address, too, and are not seen.
    """
    address, port = store
    head = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}"
    found = set()
    for table in SOCKETS:
        rows = table.read_text().splitlines()[1:] if table.exists() else []  # a kernel may have no IPv6
        for _, local, other, state in (row.split()[:4] for row in rows):
            ends = {local[-13:], other[-13:]}  # an IPv4 address ends one of IPv6 that stands for it
            if state == "01" and f"{head}:{port:04X}" in ends:
                found |= {end for end in ends if not end.startswith(head)}
    return found


def restarts() -> int:
    """0 where the file says nothing."""
    with contextlib.suppress(OSError, ValueError):
        return int(RESTARTS.read_text())
    return 0


def write_restarts(number: int) -> None:
    """A full disk costs no more than the count: the old one stays."""
    new = RESTARTS.with_suffix(".new")
    with contextlib.suppress(OSError):
        new.write_text(str(number))
        new.replace(RESTARTS)


def load_settings() -> dict[str, Any]:
    """Anew each time: the host may have changed them."""
    return dict(json.loads((HERE / SETTINGS).read_text()))


def reap(pid: int) -> int:
    """Wait for a process, and for all others that were left to process 1 meanwhile."""
    while True:
        found, status = os.wait()
        if found == pid:
            return os.waitstatus_to_exitcode(status)


def outcome(code: int, causes: Sequence[int]) -> int:
    """The exit code of the container. code: as subprocess has it, negative for a signal."""
    if causes:
        return min(causes)
    if killed := killed_for_memory():
        say(f"ended: the kernel killed {killed} of its processes for want of memory")
        return OUT_OF_MEMORY
    if code < 0:
        say(f"ended by signal {-code} ({signal.Signals(-code).name})")
        return 128 - code
    say(f"ended with {code}" + (", though nobody asked it to" if code == 0 else ""))
    return code or UNASKED


def killed_for_memory() -> int:
    """How many processes of this container the kernel has killed, since it was started, for want of memory."""
    for path in EVENTS:
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


class Silent(Exception):
    """The server did not answer as it should."""


def request(settings: dict[str, Any], method: str, path: str, body: object, timeout: float) -> str:
    """The answer's body, by the server's Unix socket. Silent for anything but 200."""
    connection = http.client.HTTPConnection("server")
    try:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout)
        connection.sock.connect(settings["socket"])
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise Silent(str(error) or type(error).__name__) from None
    finally:
        connection.close()
    if reply.status != 200:
        raise Silent(f"{reply.status}: {text[:200]}")
    return text


def ask(settings: dict[str, Any]) -> str:
    """One token, from the model itself: /health of vLLM answers while the engine hangs."""
    if settings.get("rank"):
        return "the server lives: process 1 would have ended with it"
    body = {"model": settings["model"], "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    begin = time.monotonic()
    text = request(settings, "POST", "/v1/completions", body, settings["timeout"])
    if not json.loads(text).get("choices"):
        raise Silent(f"an answer without a choice: {text[:200]}")
    (STATE / "ready").touch()
    return f"a token after {time.monotonic() - begin:.2f} s"


def metrics(settings: dict[str, Any]) -> str:
    """ "" where the server does not tell."""
    with contextlib.suppress(Silent):
        return request(settings, "GET", "/metrics", None, min(METRICS_SECONDS, settings["timeout"]))
    return ""


def work_done(settings: dict[str, Any]) -> list[str]:
    """The metrics that change while the engine computes; [] where there are none."""
    return [line for line in metrics(settings).splitlines() if ALIVE.match(line)]


def under_way(settings: dict[str, Any]) -> str:
    """How many requests; "" where the server does not tell."""
    counts = re.findall(r"^vllm:num_requests_(?:running|waiting)(?:{[^}]*})? (\S+)", metrics(settings), re.MULTILINE)
    return str(int(sum(map(float, counts)))) if counts else ""


def health(settings: dict[str, Any]) -> int:
    """0: healthy. A server that is too busy for the request is: its counters move."""
    if (STATE / "down").exists():
        print(STAYS_DOWN)
        return 1
    before = work_done(settings)
    try:
        print(ask(settings))
    except (Silent, ValueError) as error:
        if before and (after := work_done(settings)) and after != before:
            print(f"busy: no token ({error}), but it computes")
            return 0
        return failed(settings, str(error))
    (STATE / "failures").unlink(missing_ok=True)
    if time.monotonic() - float((STATE / "started").read_text()) > settings["refill"]:
        write_restarts(0)
    return 0


def failed(settings: dict[str, Any], why: str) -> int:
    """1, and after the last failure allowed the end of the server."""
    waited = time.monotonic() - float((STATE / "started").read_text())
    if not (STATE / "ready").exists() and waited < settings["start"]:
        print(f"starting for {waited:.0f} s: {why}")
        return 1
    path = STATE / "failures"
    count = 1 + (int(path.read_text()) if path.exists() else 0)
    path.write_text(str(count))
    print(f"failure {count} of {settings['failures']}: {why}")
    if count >= settings["failures"]:
        os.kill(1, signal.SIGCONT)  # whoever stopped process 1, it has to go on for this
        os.kill(1, signal.SIGUSR1)
    return 1


def main(task: str, *argv: str) -> int:
    if task == "run":
        return run(argv)
    settings = load_settings()
    if task == "health":
        return health(settings)
    try:
        print(under_way(settings) if task == "load" else ask(settings))
        return 0
    except (Silent, ValueError) as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

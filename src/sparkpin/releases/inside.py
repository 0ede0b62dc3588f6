"""Runs in a served container, with the image's Python and the standard library alone.

usage: inside.py run ARGV...   process 1: starts the server, passes signals on, ends with a code that Docker understands
       inside.py health        Docker's HEALTHCHECK: what process 1 knows of its server
       inside.py ask           one real request that counts for nothing

Why process 1 is not vLLM itself: vLLM ends with 0 when its engine process dies, and Docker's policy "on-failure" then
leaves it down. Docker does not restart a container that is unhealthy, either, and a vLLM that hangs would stay: process
1 has the model write a token now and then, and ends a server that often does not. `health` tells Docker, and `status`
by it, what came of the last time.

Docker starts the container again as often as it ends with a failure. How often that may be, process 1 counts, in a file
that outlives it; where it may not be once more, it ends with 0. A count of Docker's is never filled up again. Process 1
could start vLLM again by itself, but would have to clean up after it what a new container does not have: /tmp, shared
memory, the state of the health check.

Of a release for several machines, each container watches the other end of torch's store, and ends when that has gone:
Docker starts both again, and vLLM joins them. vLLM 0.32 and 0.33 would not: a worker whose head is gone waits for its
next step for ever, and a head learns of its worker at the next request. A machine that loses its power, or its cable,
closes no connection: process 1 of a worker has one of its own to the store, which the kernel tests (keepalive). A
worker has no API: it is well while its server lives. Docker has to start it after a boot, whatever its exit code, so at
its limit it waits without a server.

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
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETTINGS = "settings.json"
RESTARTS = HERE / "state/restarts"  # their number, since the last time that all were there again
STATE = Path("/tmp/sparkpin")  # a tmpfs: empty again at each start
HUNG, UNASKED, PEER_LOST, NO_RESERVE, ENGINE_GONE, OUT_OF_MEMORY = 70, 71, 72, 73, 74, 137
"""Exit codes. 71: ended with 0 though nobody asked; 72: another machine of the pair has gone; 73: the machine had too
little memory left, 137: its limit had none; 74: vLLM's engine process has gone."""
PROXY_STATE, UP, DOWN = "state", "up", "down"
"""A file beside the server's socket, and the words in it, for the proxy (`serve/hold.lua`): clients wait unless it
listens, or failed too often. A connection of the proxy's own to find out would cost each request half a millisecond."""
STAYS_DOWN = "stays down"  # how the last line of the log begins then
METRICS_SECONDS = 5.0
PATIENCE = 10.0  # seconds for a token; a server that takes longer has to move its counters meanwhile
STILL_SECONDS = 60.0  # more than a token and the metrics before and after it may take
FIRST_PATIENCE = 60.0  # for the first token, which the host asks for
REFILL_SECONDS = 3600.0  # without a restart: then all that are allowed are there again
SETTINGS_SECONDS = 5.0  # in which the host has written its file
SOCKET_SECONDS = 0.25  # between two tries to reach a server that starts
LOOK_SECONDS = 1  # between two looks for the other machines
GUARD_SECONDS = 0.25  # between two looks at the machine's memory, which a server may take gigabytes of in a second
MEMORY_SECONDS = 120  # that a start waits for what the machine is to keep
MEMINFO = Path("/proc/meminfo")  # proc(5): of the machine, in a container, too
PROMPT = "The sky is blue and the grass is"  # one token alone ends vLLM 0.32's engine on a CPU (causal_conv1d)
BEGUN = "starting the server"  # divides the log into lives: Docker keeps one log over all restarts
ALIVE = re.compile("vllm:(generation_tokens_total|prompt_tokens_total|kv_cache_usage_perc|iteration_tokens_total_sum)")
"""Metrics of vLLM that its engine moves whenever it computes."""
EVENTS = (  # where the kernel counts what it killed because memory ran out: cgroup 2, cgroup 1
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)
KEEPALIVE = (  # tcp(7), seconds and a number: what is silent for half a minute has gone
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # proc(5), 01: established; torch's sockets are in the second


def say(text: str) -> None:
    """By one call to the system: a signal's handler may come in between, and print does not allow that."""
    os.write(1, f"sparkpin: {text}\n".encode())


class Life:
    """One life of a server. causes: exit codes of what ended it; 0: it was asked to. over: it has ended. links: this
    process's own connection to torch's store, by its name as `connections` writes it."""

    def __init__(self) -> None:
        STATE.mkdir(mode=0o700, exist_ok=True)
        self.server: subprocess.Popen[bytes] | None = None
        self.causes: list[int] = []
        self.over = threading.Event()
        self.links: dict[str, socket.socket] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        self.settings = load_settings()
        self.state = Path(self.settings["socket"]).with_name(PROXY_STATE)

    def run(self, argv: Sequence[str]) -> int:
        """Start the server and wait for its end; the exit code of the container."""
        write(RESTARTS, str(restarts() + 1 if RESTARTS.exists() else 0))
        for left in (Path(self.settings["socket"]), self.state):  # of its last life
            left.unlink(missing_ok=True)
        say(BEGUN)
        await_memory(self.settings["floor"])
        self.server = subprocess.Popen(argv)
        self.begin_watching(self.server.pid)
        code = reap(self.server.pid)
        self.over.set()
        write(self.state, "")
        kill_others()
        for link in self.links.values():  # rank 0 takes a machine that waits at its limit for one that is there
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        code = outcome(code, self.causes)
        if code and restarts() >= (allowed := load_settings()["restarts"]):  # which may be another by now
            self.stay_down(allowed)
            return 0
        return code

    def begin_watching(self, server: int) -> None:
        tasks: list[Callable[[], None]] = []
        if not self.settings.get("rank"):
            tasks.append(lambda: self.follow_engine(server))
        if self.settings["floor"]:
            tasks.append(self.guard_memory)
        if "interval" in self.settings:  # a smoke test asks by itself
            tasks.append(lambda: watch(self.settings, self.end))
        if "store" in self.settings:
            tasks.append(self.watch_store)
        for task in tasks:
            threading.Thread(target=task, daemon=True).start()

    def stop(self, number: int, _: object) -> None:
        if self.server is None:
            sys.exit(0)
        self.causes.append(0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.server.pid, number)  # `send_signal` might reap it, which is `reap`'s

    def end(self, code: int, why: str) -> None:
        if self.causes or self.over.is_set():
            return
        say(f"ended: {why}")
        self.causes.append(code)
        kill_others()

    def follow_engine(self, server: int) -> None:
        wait_for_socket(self.settings["socket"])
        write(self.state, UP)
        wait_for_engine(server)
        if not self.causes:
            kill_others() if killed_for_memory() else self.end(ENGINE_GONE, "its engine process has gone")

    def guard_memory(self) -> None:
        floor = self.settings["floor"]
        while not self.over.wait(GUARD_SECONDS):
            with contextlib.suppress(OSError):  # the kernel may have no memory for the answer
                if (left := available()) < floor:
                    why = f"the machine had {left >> 20} MiB of memory left, and {floor >> 20} MiB are kept for it"
                    self.end(NO_RESERVE, why)

    def watch_store(self) -> None:
        known: set[str] = set()  # connections of all machines to torch's store
        while not self.over.wait(LOOK_SECONDS):
            now = connections(self.settings["store"]) - self.links.keys()
            gone = {one[:8] for one in known} - {one[:8] for one in known & now}  # also who came again meanwhile
            if gone:
                self.end(PEER_LOST, "a worker has gone from torch's store, here or on another machine")
            if now and self.settings["rank"] and not known:
                threading.Thread(target=hold, args=(self.settings["store"], self.links, self.end), daemon=True).start()
            known |= now

    def stay_down(self, allowed: int) -> None:
        say(f"{STAYS_DOWN}: it has been started again {allowed} times")
        (STATE / "down").touch()
        write(self.state, DOWN)
        while self.settings.get("rank") and 0 not in self.causes:
            time.sleep(1)


def await_memory(floor: int) -> None:
    """While another program has the memory: a server that is ended at once uses up its restarts in seconds."""
    for waited in range(MEMORY_SECONDS):
        if available() >= floor:
            return
        if not waited:
            say(f"waits for {floor >> 20} MiB of the machine's memory, up to {MEMORY_SECONDS} s")
        time.sleep(1)


def wait_for_socket(path: str) -> None:
    """Until a server listens there. vLLM does once its engine is ready; why it does not start, it says best itself."""
    while True:
        time.sleep(SOCKET_SECONDS)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            return


def wait_for_engine(server: int) -> None:
    """Until the engine process of a server has gone. By itself vLLM then answers 500 for a while, and
    ends its streams as if they were whole; clients could not tell, and new requests are to wait for the next server
    (`serve/hold.lua`)."""
    children, engine = Path(f"/proc/{server}/task/{server}/children"), None
    while engine is None:
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(OSError):  # of its other children some end meanwhile; or the kernel has no pidfd
            for child in children.read_text().split():
                if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes():
                    engine = os.pidfd_open(int(child))
    select.select([engine], [], [])


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


def hold(store: Sequence[Any], links: dict[str, socket.socket], end: Callable[[int, str], None]) -> None:
    """End the server when a connection of this process to torch's store breaks, though nobody has closed it. links: of
    `Life`, gets that connection."""
    try:
        with socket.create_connection(tuple(store), timeout=KEEPALIVE[1][2]) as link:
            for option in KEEPALIVE:
                link.setsockopt(*option)
            address, port = link.getsockname()
            links[f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"] = link
            link.settimeout(None)
            link.recv(1)  # the store sends nothing unasked; its end is seen in the kernel's table
    except OSError:
        time.sleep(2 * LOOK_SECONDS)  # an end that the table shows is told by that
        end(PEER_LOST, "the machine with torch's store no longer answers")


def restarts() -> int:
    """0 where the file says nothing."""
    with contextlib.suppress(OSError, ValueError):
        return int(RESTARTS.read_text())
    return 0


def write(path: Path, text: str) -> None:
    """Whole, or not at all: where the disk is full, what was there stays."""
    with contextlib.suppress(OSError):
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)


def load_settings() -> dict[str, Any]:
    """Again each time: the host may have changed them. It may be about to: Docker writes files of a volume in place."""
    until = time.monotonic() + SETTINGS_SECONDS
    while True:
        try:
            return dict(json.loads((HERE / SETTINGS).read_text()))
        except (OSError, ValueError):
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


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
        say(f"ended: the kernel killed {killed} of its processes because memory ran out")
        return OUT_OF_MEMORY
    if code < 0:
        say(f"ended by signal {-code} ({signal.Signals(-code).name})")
        return 128 - code
    say(f"ended with {code}" + (", though nobody asked it to" if code == 0 else ""))
    return code or UNASKED


def killed_for_memory() -> int:
    """How many processes of this container the kernel has killed, since it was started, because memory ran out."""
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


def ask(settings: dict[str, Any], patience: float) -> str:
    """One token, from the model itself: /health of vLLM answers while the engine hangs."""
    if settings.get("rank"):
        return "the server lives: process 1 would have ended with it"
    body = {"model": settings["model"], "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    begin = time.monotonic()
    text = request(settings, "POST", "/v1/completions", body, patience)
    if not json.loads(text).get("choices"):
        raise Silent(f"an answer without a choice: {text[:200]}")
    return f"a token after {time.monotonic() - begin:.2f} s"


def work_done(settings: dict[str, Any]) -> list[str]:
    """The metrics that change while the engine computes; [] where the server does not tell."""
    with contextlib.suppress(Silent):
        metrics = request(settings, "GET", "/metrics", None, METRICS_SECONDS)
        return [line for line in metrics.splitlines() if ALIVE.match(line)]
    return []


def watch(settings: dict[str, Any], end: Callable[[int, str], None]) -> None:
    """Have a token written now and then, and end a server that writes none. Returns after that alone."""
    begin, answered, failures, text = time.monotonic(), False, 0, "starting"
    while failures < settings["failures"]:
        until = time.monotonic() + settings["interval"] + STILL_SECONDS
        write(STATE / "watch", json.dumps({"well": answered and not failures, "text": text, "until": until}))
        time.sleep(settings["interval"])
        before = work_done(settings)
        try:
            text, answered, failures = ask(settings, PATIENCE), True, 0
            if time.monotonic() - begin > REFILL_SECONDS:
                write(RESTARTS, "0")
        except (Silent, ValueError) as error:
            if not answered and time.monotonic() - begin < settings["start"]:
                text = f"starting for {time.monotonic() - begin:.0f} s: {error}"
            elif before and (after := work_done(settings)) and after != before:
                text, failures = f"busy: no token ({error}), but it computes", 0
            else:
                failures += 1
                text = f"failure {failures} of {settings['failures']}: {error}"
    end(HUNG, "it stopped answering requests")


def health() -> int:
    """0: healthy, by the last token that process 1 has asked for."""
    if (STATE / "down").exists():
        print(STAYS_DOWN)
        return 1
    last = json.loads((STATE / "watch").read_text())
    is_late = time.monotonic() > last["until"]
    print("process 1 does not respond" if is_late else last["text"])
    return 0 if last["well"] and not is_late else 1


def main(task: str, *argv: str) -> int:
    if task == "run":
        return Life().run(argv)
    if task == "health":
        return health()
    try:
        print(ask(load_settings(), FIRST_PATIENCE))
        return 0
    except (Silent, ValueError) as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

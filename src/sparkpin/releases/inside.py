"""Runs in a served container, with the image's Python and the standard library alone.

usage: inside.py run ARGV...   process 1: starts the server, passes signals on, ends with a code that Docker understands
       inside.py health        Docker's HEALTHCHECK: one real request; the last failure allowed ends the server
       inside.py ask           one real request that counts for nothing
       inside.py load          prints how many requests are under way

Of a release for several machines, each container meets the others before its server starts, and ends when one of them
is gone (`peers`). Where there is no API, "health" and "ask" look at that alone.

Why process 1 is not vLLM itself: vLLM ends with 0 when its engine process dies, and Docker's policy "on-failure" then
leaves it down. Docker does not restart a container that is unhealthy, either; and no signal that a process of the
container sends, SIGKILL included, ends process 1 unless that handles it, so a vLLM that hangs would stay.

Docker starts the container again as often as it ends with a failure. How often that may be, process 1 counts, in a file
that outlives it; where it may not be once more, it ends with 0. On another machine Docker has to start it after a boot,
too, whatever its exit code, so there it waits without a server instead. A count of Docker's is never filled up again.
Process 1 could start vLLM anew by itself, but would have to clean up after it what a new container does not have: /tmp,
shared memory, the state of the health check. An end because a peer is gone does not count: the peer counts its own. In
the middle of a request vLLM fails with its peer's, before that one's process 1 knows; such an end counts here.
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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETTINGS = "settings.json"
RESTARTS = HERE / "state/restarts"  # their number, since the last time that all were there again
DOWN = HERE / "state/down"  # there once a worker has failed too often: an end that was asked for is no failure
STATE = Path("/tmp/sparkpin")  # a tmpfs: empty again at each start
PEERS_KEY = "peers.key"  # the file, beside the settings
BEAT = STATE / "beat"  # when all peers beat last; not there before they have met
HUNG, OUT_OF_MEMORY, UNASKED = 70, 137, 71  # exit codes; 71: ended with 0 though nobody asked
PEER_LOST, REFUSED = 72, 73  # exit codes; 73: a peer serves something else
STAYS_DOWN = "stays down"  # how the last line of the log begins then
METRICS_SECONDS = 5.0
LOOK_SECONDS = 5  # between two looks for processes that somebody has stopped
PROMPT = (
    "The sky is blue and the grass is"  # several tokens: one alone ends vLLM 0.32's engine on a CPU (causal_conv1d)
)
BEGUN = "starting the server"  # divides the log into lives: Docker keeps one log over all restarts
ALIVE = ("generation_tokens_total", "prompt_tokens_total", "kv_cache_usage_perc", "iteration_tokens_total_sum")
"""Metrics of vLLM that its engine moves whenever it computes."""
EVENTS = (  # where the kernel counts what it killed for want of memory: cgroup 2, cgroup 1
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
)


def say(text: str) -> None:
    print(f"sparkpin: {text}", flush=True)


def run(argv: Sequence[str]) -> int:
    """Start the server and wait for its end; the exit code of the container."""
    STATE.mkdir(mode=0o700, exist_ok=True)
    server: subprocess.Popen[bytes] | None = None
    asked: list[int] = []
    hung: list[int] = []
    lost: list[str] = []

    def stop(number: int, _: object) -> None:
        asked.append(number)
        if server is None:
            raise Asked
        server.send_signal(number)

    def end_server() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # every process of the container but this one

    def end(number: int, _: object) -> None:
        hung.append(number)
        end_server()

    def end_with_peer(why: str) -> None:
        say(f"{why}: ending this node, too")
        lost.append(why)
        end_server()

    before: set[int] = set()

    def look(number: int, _: object) -> None:
        now = stopped_processes()
        for pid in now & before:
            say(f"process {pid} was stopped by a signal; it is told to go on")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        before.clear()
        before.update(now)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGUSR1, end)
    signal.signal(signal.SIGALRM, look)
    settings = load_settings()
    worker = bool(settings.get("peers", {}).get("rank"))
    try:
        if worker and DOWN.exists() and restarts() >= settings["restarts"]:
            say_down(settings)
            while True:
                signal.pause()
        if "peers" in settings and (why := refusal(settings["peers"], end_with_peer)):
            say(f"REFUSED: {why}")
            return REFUSED
        (STATE / "started").write_text(str(time.monotonic()))
        write_restarts(restarts() + 1 if RESTARTS.exists() else 0)
        Path(settings["socket"]).unlink(missing_ok=True)  # of its last life
        say(BEGUN)
        server = subprocess.Popen(argv)
    except Asked:
        return 0
    if lost:  # before there was a server
        end_server()
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    code = reap(server.pid)
    signal.setitimer(signal.ITIMER_REAL, 0)
    end_server()
    code, settings = outcome(code, asked=bool(asked), hung=bool(hung), lost=bool(lost)), load_settings()
    if code == PEER_LOST:
        write_restarts(restarts() - 1)
        return code
    if code and restarts() >= settings["restarts"]:
        if worker:
            DOWN.touch()
            return code
        say_down(settings)
        return 0
    return code


def say_down(settings: dict[str, Any]) -> None:
    say(f"{STAYS_DOWN}: it has been started again {settings['restarts']} times")


def refusal(section: dict[str, Any], lost: Callable[[str], None]) -> str:
    """Wait until all nodes have met; "", or why they may not serve together."""
    sys.path.insert(0, str(HERE))
    from sparkpin.releases import peers  # of several machines alone, and slow to import

    def beat() -> None:
        with contextlib.suppress(OSError):  # /tmp is full: no reason to end by itself
            replace(BEAT, str(time.monotonic()))

    try:
        key = (HERE / PEERS_KEY).read_bytes()
        known = peers.Peers(section, key, peers.release_here(section), say=say, beat=beat, lost=lost)
        known.start()
        known.met.result()
    except peers.Refused as why:
        return str(why)
    return ""


def restarts() -> int:
    """0 where the file says nothing, so that a full disk costs no more than the count."""
    with contextlib.suppress(OSError, ValueError):
        return int(RESTARTS.read_text())
    return 0


def write_restarts(number: int) -> None:
    replace(RESTARTS, str(number))


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def stopped_processes() -> set[int]:
    """Those that SIGSTOP has stopped (state T, proc(5)): none that computes is, however long it takes to answer."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[0] == "T":
                found.add(int(path.parent.name))
    return found


def load_settings() -> dict[str, Any]:
    """Anew each time: the host may have changed them."""
    found: dict[str, Any] = json.loads((HERE / SETTINGS).read_text())
    return found


def reap(pid: int) -> int:
    """Wait for a process, and for all others that were left to process 1 meanwhile."""
    while True:
        found, status = os.wait()
        if found == pid:
            return os.waitstatus_to_exitcode(status)


def outcome(code: int, *, asked: bool, hung: bool, lost: bool) -> int:
    """code: as subprocess has it, negative for a signal."""
    if asked:
        return 0
    if hung:
        say("ended: it answered no request any more")
        return HUNG
    if lost:
        return PEER_LOST
    if killed := killed_for_memory():
        say(f"ended: the kernel killed {killed} of its processes for want of memory")
        return OUT_OF_MEMORY
    if code < 0:
        say(f"ended by signal {-code} ({signal.Signals(-code).name})")
        return 128 - code
    if code == 0:
        say("ended with 0, though nobody asked it to")
        return UNASKED
    say(f"ended with {code}")
    return code


def killed_for_memory() -> int:
    """How many processes of this container the kernel has killed, since it was started, for want of memory."""
    for path in EVENTS:
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


class Asked(Exception):
    """To end, before there is a server."""


class Silent(Exception):
    """The server did not answer as it should."""


class Connection(http.client.HTTPConnection):
    """To the server's Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("server", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def request(settings: dict[str, Any], method: str, path: str, body: object, timeout: float) -> str:
    """The answer's body. Silent for anything but 200."""
    connection = Connection(settings["socket"], timeout)
    try:
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
    """One token, from the model itself: /health of vLLM answers while the engine hangs. Where there is no API: a beat
    of the peers."""
    if settings.get("peers", {}).get("rank"):
        return beaten(settings["peers"]["silent"])
    body = {"model": settings["model"], "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    begin = time.monotonic()
    text = request(settings, "POST", "/v1/completions", body, settings["timeout"])
    if not json.loads(text).get("choices"):
        raise Silent(f"an answer without a choice: {text[:200]}")
    (STATE / "ready").touch()
    return f"a token after {time.monotonic() - begin:.2f} s"


def beaten(silent: float) -> str:
    """Process 1 writes it, and ends with the server; so both live."""
    try:
        age = time.monotonic() - float(BEAT.read_text())
    except OSError:
        raise Silent("it waits for the other nodes") from None
    if age > silent:
        raise Silent(f"the last beat of the other nodes was {age:.0f} s ago")
    (STATE / "ready").touch()
    return f"the other nodes beat, {age:.1f} s ago"


def work_done(settings: dict[str, Any]) -> list[str]:
    """The lines of /metrics that change while the engine computes; [] where there are none."""
    try:
        text = request(settings, "GET", "/metrics", None, min(METRICS_SECONDS, settings["timeout"]))
    except Silent:
        return []
    return [line for line in text.splitlines() if line.startswith(tuple(f"vllm:{name}" for name in ALIVE))]


def under_way(settings: dict[str, Any]) -> str:
    """How many requests; "" where the server does not tell."""
    text = request(settings, "GET", "/metrics", None, settings["timeout"])
    counts = re.findall(r"^vllm:num_requests_(?:running|waiting)(?:{[^}]*})? (\S+)", text, re.MULTILINE)
    return str(int(sum(map(float, counts)))) if counts else ""


def health(settings: dict[str, Any]) -> int:
    """0: healthy. A server that is too busy for the request is: its counters move."""
    if "peers" in settings and not BEAT.exists():
        print("it waits for the other nodes")  # however long: that is no failure of this one
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
    except (Silent, ValueError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""What the proxy costs: streams of a served release by the published port and by the server's own socket, in turns.

usage: .venv/bin/invoke serve; then, as root: .venv/bin/python benchmarks/proxy.py [--runs 40] [--tokens 100]

Root, because the socket lies in a volume of Docker's. One request at a time, each with a connection of its own. What a
first token waits for the proxy is measured by requests that the engine has no part in: its own step of 10 ms on a CPU
hides a millisecond. Goals: at most 1 ms more to the answer and 0.2 ms a token; above one of them the exit status is 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.serve import launch, served

ANSWER_GOAL, TOKEN_GOAL = 1.0, 0.2  # milliseconds


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--runs", type=int, default=40)
    options.add_argument("--tokens", type=int, default=100)
    given = options.parse_args()
    engine = Engine.connect()
    found = next(one for one in served.status(engine) if one.home == str(Paths.from_env().home))
    volume = Path(engine.client.volumes.get(found.container).attrs["Mountpoint"])
    path = volume / Path(launch.SOCKET_PATH).relative_to(launch.SOCKETS)

    def direct() -> socket.socket:
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(path))
        return link

    def through() -> socket.socket:
        link = socket.create_connection((found.address.host, found.address.port))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link

    ways = {"socket": direct, "proxy": through}
    kinds = {
        "an answer": (10 * given.runs, answer),
        "a token": (given.runs, partial(stream, model=found.model, tokens=given.tokens)),
    }
    rows, more = [], []
    for (what, (runs, measure)), goal in zip(kinds.items(), (ANSWER_GOAL, TOKEN_GOAL), strict=True):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for run in range(-2, runs):
            for name in ways if run % 2 else reversed(ways):
                took = 1e3 * measure(ways[name]())
                time.sleep(0.02)  # the proxy lets 100 requests of an address begin in a second
                if run >= 0:
                    times[name].append(took)
        medians = [statistics.median(times[name]) for name in ways]
        more.append(statistics.median(b - a for a, b in zip(times["socket"], times["proxy"], strict=True)))
        rows.append((what, *(f"{one:.2f}" for one in medians), f"{more[-1]:+.2f}", f"{goal}"))
    terminal.table(("ms", *ways, "more", "at most"), rows)
    print(f"{given.runs} streams of {given.tokens} tokens each; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    sys.exit(more[0] > ANSWER_GOAL or more[1] > TOKEN_GOAL)


def answer(link: socket.socket) -> float:
    """Seconds of a request that vLLM's web server answers by itself."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = link
    begun = time.perf_counter()
    connection.request("GET", "/v1/models")
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    reply.read()
    connection.close()
    return time.perf_counter() - begun


def stream(link: socket.socket, model: str, tokens: int) -> float:
    """Seconds a token, from the first one on."""
    body = {"model": model, "prompt": "The sky is blue and the grass is", "max_tokens": tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("localhost")
    connection.sock = link
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    moments = [time.perf_counter() for line in reply if line.startswith(b"data: {")]
    connection.close()
    return (moments[-1] - moments[0]) / (tokens - 1)


if __name__ == "__main__":
    main()

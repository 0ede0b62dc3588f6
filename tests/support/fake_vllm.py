"""Answers as vLLM 0.32 gave them (data/smoke/recorded.json), over a Unix socket or TCP, whole or with one fault.

Standard library only: the tests run it in their own process and, as `vllm serve`, in containers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

Reply = tuple[int, str, bytes]
Fault = Callable[[str, Reply], Reply]

JSON, STREAM, TEXT = "application/json", "text/event-stream; charset=utf-8", "text/plain"
RECORDED = {
    entry["check"]: (200, entry["content_type"], entry["response"].encode())
    for entry in json.loads((Path(__file__).parents[1] / "data/smoke/recorded.json").read_text(encoding="utf-8"))
}


RECORDED["models"] = (
    200,
    JSON,
    b'{"object":"list","data":[{"id":"scripted-tiny","object":"model","created":1795320152,"owned_by":"vllm",'
    b'"root":"/model","parent":null,"max_model_len":2048}]}',
)


def kind_of(path: str, body: dict) -> str:
    """Which recorded answer a request asks for: the name of a check."""
    if path == "/metrics":
        return "acceptance"
    if path == "/health":
        return "health"
    if path == "/v1/models":
        return "models"
    if path == "/v1/completions":
        return "drift" if "prompt_logprobs" in body else "completion"
    first, last = body["messages"][0], body["messages"][-1]
    said, stream = last["content"], "-stream" if body.get("stream") else ""
    if last["role"] == "tool":
        return "tool-answer"
    if not isinstance(said, str):
        return "image"
    if not body.get("tools"):
        if body.get("logprobs"):
            return "logprobs"
        if "Pijamalı" in said:
            return "unicode"
        if "<|scripted_chat|>" in said:
            return "recall-chat"
        if "<|scripted_" in said or "pass words" in said:
            return "recall"
        return f"chat{stream}" if body.get("ignore_eos") or "long" not in said else "long-text"
    if body["tool_choice"] == "required":
        kind = "tool-call-required"
    elif "both" in said:
        kind = "tool-calls-parallel"
    elif "file" in said:
        kind = "tool-call-long"
    elif "while you think" in said:
        kind = "tool-call-in-reasoning"
    else:
        kind = "tool-examples" if first["role"] == "system" else "tool-call"
    return f"{kind}{stream}"


def whole(kind: str, reply: Reply) -> Reply:
    return reply


def only(kind: str, change: Callable[[Reply], Reply]) -> Fault:
    return lambda asked, reply: change(reply) if asked == kind else reply


def text(old: str, new: str, count: int = 1) -> Callable[[Reply], Reply]:
    def change(reply: Reply) -> Reply:
        assert old.encode() in reply[2], f"{old!r} is not in the recorded answer"
        return reply[0], reply[1], reply[2].replace(old.encode(), new.encode(), count)

    return change


def instead(status: int, kind: str, body: bytes) -> Callable[[Reply], Reply]:
    return lambda reply: (status, kind, body)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, body: dict) -> None:
        kind = kind_of(self.path, body)
        if self.server.hangs.is_set() and kind != "health":
            time.sleep(3600)
        if body.get("prompt") == "hang":
            self.server.hangs.set()
        if body.get("prompt") == "slow":
            time.sleep(5)
        status, content_type, content = self.server.fault(kind, RECORDED.get(kind, (200, TEXT, b"")))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        if content.endswith(b"<reset>"):
            self.send_header("Content-Length", str(len(content) + 1000))
            content, self.close_connection = content.removesuffix(b"<reset>"), True
        else:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if content.endswith(b"<trickle>"):
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
            self.wfile.write(content)

    def address_string(self) -> str:
        return "socket"

    def log_message(self, format: str, *args: object) -> None:
        pass


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 2048  # as uvicorn's
    fault: Fault = staticmethod(whole)
    hangs = threading.Event()


class TcpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = allow_reuse_address = True
    fault: Fault = staticmethod(whole)
    hangs = threading.Event()


@contextlib.contextmanager
def serving(server: UnixServer | TcpServer, fault: Fault = whole) -> Iterator[None]:
    server.fault = fault
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main(argv: list[str], fault: str) -> None:
    """`vllm serve MODEL --uds PATH`, `--host HOST --port PORT` or `--headless`, told by FAKE_VLLM what to do wrong.

    worker-NAME: what `--headless` does wrong. Where that ends at once, the others wait for it, as vLLM's do.
    """
    headless = "--headless" in argv
    if fault.startswith("worker-"):
        fault = fault.removeprefix("worker-") if headless else {"worker-exit": "silent"}.get(fault, "")
    print(f"version 0.32.0\nargv {json.dumps(argv)}\nuid {os.getuid()}", flush=True)
    print("facts", json.dumps(facts(argv[0])), flush=True)
    if fault == "exit":
        print("RuntimeError: no such architecture", file=sys.stderr)
        raise SystemExit(1)
    if fault == "memory":
        hoard = []
        while True:
            hoard.append(b"x" * (64 << 20))
    if fault == "silent":
        time.sleep(3600)
    value = dict(itertools.pairwise(argv))
    held = torch_store(value, headless) if "--nnodes" in argv else []  # noqa: F841  # as long as this process lives
    if fault != "without-mods":
        print('INFO SPARKPIN_MOD {"mod":"vllm-cpu","event":"active","version":"0"}', flush=True)
        if "--nnodes" in argv:
            print('INFO SPARKPIN_MOD {"mod":"modkit","event":"agreed","version":"0"}', flush=True)
    print("INFO Loading weights took 0.25 seconds", flush=True)
    print("Application startup complete.", flush=True)
    if headless:
        signal.signal(signal.SIGINT, lambda *_: os._exit(0))
        signal.pause()
    server = (
        UnixServer(value["--uds"], Handler)
        if "--uds" in value
        else TcpServer((value["--host"], int(value["--port"])), Handler)
    )
    if fault == "dies":

        def die(kind: str, reply: Reply) -> Reply:
            if kind == "chat":
                print("EngineDeadError", flush=True)
                os._exit(3)
            return reply

        server.fault = die
    if fault == "completions-500":
        server.fault = lambda kind, reply: reply if kind == "health" else (500, JSON, b'{"error": "EngineCore died"}')
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    server.serve_forever()


def torch_store(value: dict[str, str], headless: bool) -> list[socket.socket]:
    """Connections to the store of rank 0, which waits for all others."""
    address = value["--master-addr"], int(value["--master-port"])
    time.sleep(3 if headless else 0)  # vLLM takes longer; by then a head whose worker has gone has ended, too
    while headless:
        with contextlib.suppress(OSError):
            return [socket.create_connection(address)]
        time.sleep(0.1)
    listener = socket.create_server(address)
    return [listener, *(listener.accept()[0] for _ in range(int(value["--nnodes"]) - 1))]


def facts(model: str) -> dict[str, bool]:
    """What the container lets its process do."""

    def can(act: Callable[[], object]) -> bool:
        try:
            act()
        except OSError:
            return False
        return True

    status = Path("/proc/self/status").read_text()
    return {
        "model_readable": can(lambda: (Path(model) / "config.json").read_bytes()),
        "model_writable": can(lambda: (Path(model) / "new").write_bytes(b"")),
        "root_writable": can(lambda: Path("/usr/new").write_bytes(b"")),
        "tmp_writable": can(lambda: Path("/tmp/new").write_bytes(b"")),
        "home_writable": can(lambda: (Path.home() / "new").write_bytes(b"")),
        "capabilities": "CapEff:\t0000000000000000" not in status or "CapBnd:\t0000000000000000" not in status,
        "new_privileges": "NoNewPrivs:\t1" not in status,
        "network": len(os.listdir("/sys/class/net")) > 1,
    }


if __name__ == "__main__":
    main(sys.argv[2:], os.environ.get("FAKE_VLLM", ""))

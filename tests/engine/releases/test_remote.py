"""Checkpoints on another machine: by the real rsync over a real ssh server."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_releases import release
from ssh_host import SshHost, ssh_host

from sparkpin.checkpoint.content import RECORD, TABLE
from sparkpin.core.errors import InputError, NetworkError
from sparkpin.releases.remote import checkpoint_at, send_checkpoint

KEY = hashlib.sha256(b"a checkpoint of the tests").hexdigest()
ONE = dataclasses.replace(release(1), checkpoint_key=KEY)
LARGE = "model-00002.safetensors"
SIZES = {"config.json": 700, "model-00001.safetensors": 5 << 20, LARGE: 100 << 20, "sub/tokenizer.json": 0}
RUN = """
import pickle, sys
from sparkpin.releases.remote import send_checkpoint
send_checkpoint(*pickle.loads(bytes.fromhex(sys.argv[1])))
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshHost]:
    with ssh_host(tmp_path / "ssh", "unix:///nowhere") as found:
        monkeypatch.setenv("PATH", found.path)
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, rows = tmp_path_factory.mktemp("checkpoint"), {}
    for number, (name, size) in enumerate(SIZES.items()):
        data = random.Random(number).randbytes(size)
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(data)
        rows[name] = {"size": size, "sha256": hashlib.sha256(data).hexdigest()}
    (made / RECORD).write_text(json.dumps({"key": KEY, "files": rows}))
    (made / TABLE).write_text("{}")  # of this machine
    return made


def contents(folder: Path) -> dict[str, bytes]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != TABLE}


def folder_there(host: SshHost) -> Path:
    return host.home / f"carried/{ONE.model}/{KEY[:16]}"


def bytes_in(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # rsync renames what is complete
            found += path.stat().st_size
    return found


def test_it_is_as_here_and_everybody_may_read_it(host: SshHost, folder: Path) -> None:
    send_checkpoint(host.url, ONE, folder)
    there = folder_there(host)
    assert checkpoint_at(host.url, ONE) == str(there) and contents(there) == contents(folder)
    assert not (there / TABLE).exists()
    assert {path.stat().st_mode & 0o777 for path in there.rglob("*") if path.is_file()} == {0o444}
    assert there.stat().st_mode & 0o777 == 0o755
    inode = (there / LARGE).stat().st_ino
    send_checkpoint(host.url, ONE, folder)
    assert (there / LARGE).stat().st_ino == inode, "what is there is not sent"
    (there / RECORD).unlink()
    assert checkpoint_at(host.url, ONE) == "", "without its record it is none"


def test_what_was_changed_there_is_sent_again(host: SshHost, folder: Path) -> None:
    send_checkpoint(host.url, ONE, folder)
    there = folder_there(host)
    (there / "strange.py").write_text("")
    times = (there / LARGE).stat()
    (there / LARGE).chmod(0o644)
    with (there / LARGE).open("r+b") as file:
        file.write(b"other bytes")
    os.utime(there / LARGE, ns=(times.st_atime_ns, times.st_mtime_ns))
    send_checkpoint(host.url, ONE, folder, deep=True)
    assert contents(there) == contents(folder)


def test_a_killed_run_leaves_no_checkpoint_and_is_gone_on_with(host: SshHost, folder: Path) -> None:
    there = folder_there(host)
    order = pickle.dumps((host.url, ONE, folder)).hex()
    running = subprocess.Popen([sys.executable, "-c", RUN, order], start_new_session=True)
    while bytes_in(there) < 20 << 20:
        assert running.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert not (there / RECORD).exists()
    send_checkpoint(host.url, ONE, folder)
    assert contents(there) == contents(folder)


def test_where_it_cannot_go_is_one_clear_error(host: SshHost, folder: Path) -> None:
    with pytest.raises(InputError):
        send_checkpoint("tcp://127.0.0.1:2375", ONE, folder)
    host.refuse()
    with pytest.raises(NetworkError):
        send_checkpoint(host.url, ONE, folder)

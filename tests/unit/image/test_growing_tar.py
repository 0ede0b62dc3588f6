"""Reading a tar while another process writes it."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from sparkpin.core.errors import BuildError
from sparkpin.image.growing_tar import read_layer_of
from sparkpin.image.layer_tar import read_layer

WRITE = """
import sys, time
from pathlib import Path
data = Path(sys.argv[1]).read_bytes()
time.sleep(0.1)
with open(sys.argv[2], "wb", buffering=0) as out:
    for begin in range(0, len(data), 100_001):  # no multiple of a tar's block
        out.write(data[begin : begin + 100_001])
        time.sleep(0.005)
"""


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    path = tmp_path / "ready.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(300):
            info = tarfile.TarInfo(f"folder/{number % 7}/file_{number}" + "x" * (number % 150))
            info.size = number * 37
            tar.addfile(info, io.BytesIO(bytes([number % 256]) * info.size))
    return path


def slowly(source: Path, target: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITE, str(source), str(target)], check=True)


def test_comes_to_what_a_finished_file_does(tmp_path: Path, ready: Path) -> None:
    growing = tmp_path / "growing.tar"
    growing.write_bytes(b"of an earlier build, and no tar" * 1000)
    layer = read_layer_of(growing, lambda: slowly(ready, growing))
    with layer.source, ready.open("rb", buffering=0) as file:
        expected = read_layer(file)
        assert layer.members == expected.members and len(layer.members) == 300
        assert b"".join(map(bytes, layer.chunks())) == b"".join(map(bytes, expected.chunks()))


def test_headers_are_read_before_the_writer_ends(tmp_path: Path, ready: Path) -> None:
    """Else this waits for ever: the rest is only written once the file was opened and read to where it ends."""
    growing, data = tmp_path / "growing.tar", ready.read_bytes()

    def write() -> None:
        with growing.open("wb", buffering=0) as out:
            out.write(data[: len(data) // 2])
            while read_position(growing) < len(data) // 2:
                time.sleep(0.005)
            out.write(data[len(data) // 2 :])

    with read_layer_of(growing, write).source:
        pass


def read_position(path: Path) -> int:
    """Of this process's reader of the file."""
    for entry in Path("/proc/self/fdinfo").iterdir():
        try:
            if (Path("/proc/self/fd") / entry.name).readlink() == path:
                fields = dict(line.split(":\t") for line in entry.read_text().splitlines() if ":\t" in line)
                if int(fields["flags"], 8) & 3 == 0:  # O_RDONLY
                    return int(fields["pos"])
        except OSError:
            continue
    return 0


def test_a_writer_that_fails_ends_the_reading(tmp_path: Path, ready: Path) -> None:
    growing = tmp_path / "growing.tar"

    def write() -> None:
        growing.write_bytes(ready.read_bytes()[:5_000])
        time.sleep(0.05)
        raise BuildError("the engine says no", next_step="mend the stage")

    begun = time.monotonic()
    with pytest.raises(BuildError, match="the engine says no"):
        read_layer_of(growing, write)
    assert time.monotonic() - begun < 30

    def write_nothing() -> None:
        raise BuildError("not even begun", next_step="mend the stage")

    with pytest.raises(BuildError, match="not even begun"):
        read_layer_of(growing, write_nothing)


def test_a_tar_that_was_cut_is_damage(tmp_path: Path, ready: Path) -> None:
    growing, data = tmp_path / "growing.tar", ready.read_bytes()
    with pytest.raises(BuildError, match="the layer ends within byte"):
        read_layer_of(growing, lambda: growing.write_bytes(data[: data.index(b"folder/") + 100]))
    last = data.rindex(bytes([299 % 256]) * 299)
    layer = read_layer_of(growing, lambda: growing.write_bytes(data[:last]))
    with layer.source, pytest.raises(BuildError, match="the layer ends before byte"):
        list(layer.chunks())


def test_a_writer_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_layer_of(tmp_path / "growing.tar", lambda: None)

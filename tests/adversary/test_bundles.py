"""A bundle that was damaged or changed on its way: each of its bytes counts, and a refusal leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from bundle_samples import sample_of, write_sample

from sparkpin.core.errors import IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.distribute import transfer
from sparkpin.host.engine import Engine

EACH = 25
BLOCK = 512


def flip(data: bytearray, chance: random.Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def overwrite(data: bytearray, chance: random.Random) -> None:
    at, size = chance.randrange(len(data)), chance.randrange(1, 2000)
    data[at : at + size] = chance.randbytes(len(data[at : at + size]))


def insert(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    data[at:at] = chance.randbytes(chance.choice((1, BLOCK)))


def append(data: bytearray, chance: random.Random) -> None:
    data += chance.choice((bytes(BLOCK), bytes(2 * BLOCK), b"x", chance.randbytes(BLOCK)))


def lose_a_block(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data) // BLOCK) * BLOCK
    del data[at : at + BLOCK]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("bundle")
    return write_sample(sample_of(folder / "sample"), folder / "good.tar").read_bytes()


@pytest.mark.parametrize("harm", [flip, cut, overwrite, insert, append, lose_a_block])
def test_what_was_changed_is_refused(
    good: bytes, tmp_path: Path, harm: Callable[[bytearray, random.Random], None]
) -> None:
    paths, path = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home"), tmp_path / "bad.tar"
    chance = random.Random(harm.__name__)
    for _ in range(EACH):
        data = bytearray(good)
        harm(data, chance)
        path.write_bytes(data)
        with pytest.raises(IntegrityError) as caught:
            transfer.import_bundle(paths, cast(Engine, None), path)
        assert caught.value.next_step
        assert [child.name for child in tmp_path.iterdir()] == ["bad.tar"]

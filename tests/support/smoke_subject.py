"""A server with recorded answers, in the place of vLLM, and what the smoke test knows of its release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_vllm
import pytest
from fake_vllm import Fault, whole

from sparkpin.smoke.client import Client
from sparkpin.smoke.expectations import scripted
from sparkpin.smoke.subject import SmokeSubject

LOG = b"""(EngineCore pid=9) INFO 11-21 08:03:51 [experts.py:58] SPARKPIN_MOD {"mod":"vllm-cpu","event":"active"}
(EngineCore pid=9) INFO 11-21 08:03:51 [m.py:46] SPARKPIN_MOD {"mod":"int8-lm-head","event":"active","V":1024,"x":[1]}
"""


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "vllm.sock"


@contextmanager
def subject(
    socket: Path, fault: Fault = whole, *, timeout: float = 20, handler: type[fake_vllm.Handler] = fake_vllm.Handler
) -> Iterator[SmokeSubject]:
    server = fake_vllm.UnixServer(str(socket), handler)
    with fake_vllm.serving(server, fault), Client.unix(socket, timeout=timeout) as client:
        yield SmokeSubject(
            client,
            "scripted-tiny",
            scripted(),
            lambda: LOG,
            frozenset({"vllm-cpu", "int8-lm-head"}),
            0.8,
            floors=(0.8, 0.6),
            argv=("vllm", "serve", "/model", "--max-model-len", "2048", "--no-enable-prefix-caching"),
        )

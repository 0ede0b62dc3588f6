"""A server with recorded answers, in the place of vLLM, and what the smoke test knows of its release."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import fake_vllm
import pytest
from fake_vllm import Fault, whole

from sparkpin.releases.record import Demands
from sparkpin.smoke.checks import CheckResult, run_check
from sparkpin.smoke.client import Client
from sparkpin.smoke.expectations import expectations
from sparkpin.smoke.subject import SmokeSubject

DRAFTS = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":2}')
LOG = b"""(EngineCore pid=9) INFO 11-21 08:03:51 [experts.py:58] SPARKPIN_MOD {"mod":"vllm-cpu","event":"active"}
(EngineCore pid=9) INFO 11-21 08:03:51 [m.py:46] SPARKPIN_MOD {"mod":"int8-lm-head","event":"active","V":1024,"x":[1]}
"""
DEMANDS = Demands(
    checks=(), mods=("vllm-cpu", "int8-lm-head"), acceptance_floor=0.8, position_floors=(0.8, 0.6), scripted=True
)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "vllm.sock"


class Checked(Protocol):
    def __call__(self, name: str, fault: Fault = whole, **changes: Any) -> CheckResult: ...


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    """Runs a check against a server with a fault. changes: of the subject, of what its release demands, or timeout and
    handler of `subject`."""
    number = itertools.count()

    def run(name: str, fault: Fault = whole, **changes: Any) -> CheckResult:
        served = {key: changes.pop(key) for key in ("timeout", "handler") if key in changes}
        demands = {key: changes.pop(key) for key in list(changes) if key in Demands.model_fields}
        with subject(tmp_path / f"{next(number)}.sock", fault, **served) as target:
            changes["demands"] = target.demands.model_copy(update=demands)
            return run_check(name, dataclasses.replace(target, **changes))

    return run


@contextmanager
def subject(
    socket: Path, fault: Fault = whole, *, timeout: float = 20, handler: type[fake_vllm.Handler] = fake_vllm.Handler
) -> Iterator[SmokeSubject]:
    server = fake_vllm.UnixServer(str(socket), handler)
    with fake_vllm.serving(server, fault), Client.unix(socket, timeout=timeout) as client:
        yield SmokeSubject(
            client,
            "scripted-tiny",
            expectations("scripted"),
            lambda: (LOG,),
            DEMANDS,
            ("vllm", "serve", "/model", "--max-model-len", "2048", "--no-enable-prefix-caching", *DRAFTS),
        )

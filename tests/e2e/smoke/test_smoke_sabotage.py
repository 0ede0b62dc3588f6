"""A real server, broken in one way after another: the check that is there for it says so, and others do not.

One server of the cpu stack's last stage runs all the time; sabotage/sparkpin_sabotage.py breaks it and mends it again.
It needs the smoke test of the stage below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import PROJECT
from sabotaged import Broken, installed, serving

from sparkpin.build.make import checkpoint_of
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release
from sparkpin.serve import proxy
from sparkpin.smoke import checks, logprobs
from sparkpin.smoke.demands import READERS
from sparkpin.smoke.subject import Reference

pytestmark = pytest.mark.slow

STAGE = "v2-tq"


@dataclass(frozen=True)
class Sabotage:
    """caught: the checks that must fail; says: words of the first one's reason, lest it fail of something else;
    passes: those that must not fail, though the server is broken.
    """

    name: str
    caught: tuple[str, ...]
    says: str
    passes: tuple[str, ...]


FAR = "from sparkpin/scripted-tiny:v2-"
SABOTAGES = (
    Sabotage("head-scales", ("drift",), FAR, ("chat", "tool-call-stream", "logprobs", "acceptance")),
    Sabotage("head-rows", ("completion", "chat", "drift"), "content differs at character", ("mods",)),
    Sabotage(
        "mtp-shuffled",
        ("acceptance",),
        "drafted tokens accepted (",
        ("chat", "long-text", "tool-call-stream", "drift"),
    ),
    Sabotage("shared-scales", ("drift",), FAR, ("chat", "tool-call-stream", "logprobs")),
    Sabotage("kv-codes", ("drift",), FAR, ("completion", "logprobs", "mods")),
    Sabotage("kv-window", ("long-context",), "content differs", ("chat", "tool-call-stream", "drift")),
    Sabotage("state-kept", ("drift",), "asked again the text differs", ("chat", "logprobs")),
    Sabotage("hot", ("chat-sampled", "tool-call-sampled"), "content differs", ("chat", "tool-call-stream", "drift")),
    Sabotage("nan-logprobs", ("logprobs", "drift"), "not JSON compliant", ("chat", "chat-sampled")),
    Sabotage("never-freed", ("cancelled",), "3 requests and ", ("chat",)),
    Sabotage("no-template", ("chat", "tool-call-stream"), "you must provide a chat template", ("completion", "drift")),
    Sabotage("tool-parser", ("tool-call", "tool-call-stream"), "got 0 tool calls", ("chat", "completion")),
    Sabotage("no-reasoning-parser", ("chat", "chat-stream"), "got 'They ask", ("completion", "logprobs")),
    Sabotage("no-end", ("completion", "chat"), "got ' a pinned build gives", ("drift", "mods")),
    Sabotage("bytes-apart", ("unicode", "tool-answer"), "got '\ufffd\ufffdli, s", ("chat", "tool-call-stream")),
    Sabotage(
        "nameless",
        ("tool-call-stream", "tool-calls-parallel"),
        "name: None is not of type",
        ("tool-call", "chat-stream"),
    ),
)


@pytest.fixture(scope="module")
def release(smoked: dict[str, Release]) -> Release:
    return smoked[STAGE]


def below(release: Release) -> Reference:
    reference = logprobs.reference(Paths.from_env(PROJECT), release)
    assert reference, f"stage {release.demands.parent} has not left {logprobs.FILE}: invoke up"
    return reference


def copy_of_checkpoint(release: Release, folder: Path) -> Path:
    """One that can be changed."""
    return shutil.copytree(checkpoint_of(Paths.from_env(PROJECT), release), folder, copy_function=shutil.copyfile)


@pytest.fixture(scope="module")
def broken(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    folder = tmp_path_factory.mktemp("sabotaged")
    model = copy_of_checkpoint(release, folder / "model")
    variant = installed(release, model)
    with serving(variant, model, folder / "home", below(variant)) as server:
        yield server


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.name)
def test_a_sabotage_is_caught_by_name(sabotage: Sabotage, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "FREED_SECONDS", 1.0)
    broken.by(sabotage.name)
    try:
        names = sorted((*sabotage.caught, *sabotage.passes), key=lambda name: name in READERS)
        seen = broken.verdicts(*names)
    finally:
        broken.by("")
    assert {name for name, verdict in seen.items() if verdict != "ok"} == set(sabotage.caught), seen
    assert sabotage.says in seen[sabotage.caught[0]]


@pytest.mark.parametrize(
    ("rule", "instead", "caught"),
    [
        ("acl post var(txn.path) -m str", "acl post var(txn.path) -m str /none #", ("completion", "chat", "drift")),
        ("default_backend", "http-response wait-for-body time 60s\n  default_backend", ("cancelled",)),
    ],
    ids=["path-refused", "stream-collected"],
)
def test_a_fault_of_the_proxy_is_caught(
    rule: str, instead: str, caught: tuple[str, ...], broken: Broken, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The proxy is that of `serve`, with one line of its configuration changed; the server is sound."""
    config = proxy.ProxyOrder.config
    monkeypatch.setattr(proxy.ProxyOrder, "config", lambda *all: config(*all).replace(rule, instead))
    monkeypatch.setattr(proxy, "CLIENTS", "others")
    paths, there = dataclasses.replace(Paths.from_env(PROJECT), home=tmp_path), (broken.server, broken.subject.client)
    with proxy.before(paths, contextlib.nullcontext(there)) as (_, client):
        faulty = dataclasses.replace(broken, subject=dataclasses.replace(broken.subject, client=client))
        seen = faulty.verdicts("completion", "chat", "chat-stream", "drift", "cancelled")
    assert {name for name in caught if seen[name] != "ok"} == set(caught), seen
    assert seen["chat-stream"] == "ok" or caught != ("cancelled",), "what comes late comes whole"


def test_the_same_server_passes_when_it_is_mended(broken: Broken) -> None:
    """Else what was caught may have been the plugin, or what an earlier sabotage left."""
    broken.by("")
    names = {name for sabotage in SABOTAGES for name in (*sabotage.caught, *sabotage.passes)} - set(READERS)
    assert set(broken.verdicts(*sorted(names), *READERS).values()) == {"ok"}


def test_the_documentation_lists_every_sabotage() -> None:
    text = (PROJECT / "benchmarks/notes/smoke.md").read_text()
    row = r"^\| `([\w-]+)` \|.*\| (`[^|]*`) \| (`[^|]*) \|$"
    rows = re.findall(row, text.partition("## What was broken")[2], re.M)
    told = {name: tuple(tuple(re.findall(r"`([\w-]+)`", cell)) for cell in cells) for name, *cells in rows}
    assert told == {sabotage.name: (sabotage.caught, sabotage.passes) for sabotage in SABOTAGES}

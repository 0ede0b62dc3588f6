"""A real server, broken in one way after another: the check that is there for it says so, and others do not.

One server of the cpu stack's last stage runs all the time; sabotage/sparkpin_sabotage.py breaks it and mends it again.
Needs what ./install.sh leaves, the smoke test of the stage below among it.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from checkout import PROJECT
from sparkpin.container import ready_timeout
from sparkpin.engine import Engine
from sparkpin.jobs import checkpoint_of
from sparkpin.paths import Paths
from sparkpin.releases import Releases
from sparkpin.smoke import drafting, drift, probes
from sparkpin.smoke.checks import READERS, run_check
from sparkpin.smoke.client import Client
from sparkpin.smoke.run import subject_of
from sparkpin.smoke.server import Server, started
from sparkpin.smoke.subject import Subject

STAGE = "v2-tq"
PLUGIN = PROJECT / "tests/sabotage/sparkpin_sabotage.py"
INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: sparkpin-sabotage\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\nsabotage = sparkpin_sabotage:register\n",
}
SABOTAGED_SECONDS = 300.0  # the engine looks for objects while it may be busy


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
    Sabotage("tool-parser", ("tool-call", "tool-call-stream"), "saw 0 tool calls", ("chat", "completion")),
    Sabotage("no-reasoning-parser", ("chat", "chat-stream"), "saw 'They ask", ("completion", "logprobs")),
    Sabotage("no-end", ("completion", "chat"), "saw ' a pinned build gives", ("drift", "mods")),
    Sabotage("bytes-apart", ("unicode", "tool-answer"), "saw '\ufffd\ufffdli, s", ("chat", "tool-call-stream")),
    Sabotage(
        "nameless",
        ("tool-call-stream", "tool-calls-parallel"),
        "first delta has name None",
        ("tool-call", "chat-stream"),
    ),
)


@dataclass(frozen=True)
class Broken:
    """A server that can be broken."""

    server: Server
    subject: Subject

    def by(self, name: str) -> None:
        """Return once each of its processes says that it is so; "" mends it. No answer to an earlier call is taken."""
        folder = self.server.socket.parent
        wanted = f"{name} {time.monotonic_ns()}"
        new = folder / "sabotage.new"
        new.write_text(wanted)
        new.rename(folder / "sabotage")
        until = time.monotonic() + SABOTAGED_SECONDS
        for role in ("api", "engine"):
            done = folder / f"done-{role}"
            while not (said := done.read_text() if done.exists() else "").startswith(wanted):
                assert time.monotonic() < until, f"{role} did not do {wanted!r}: {said}"
                time.sleep(0.05)
            assert said == wanted, said

    def verdicts(self, *names: str) -> dict[str, str]:
        results = [run_check(name, self.subject) for name in names]
        print("\n".join(f"{result.name}: {result.verdict}, {result.detail}" for result in results))
        return {result.name: "ok" if result.passed else result.detail for result in results}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    paths = Paths.from_env(PROJECT)
    release = [one for one in Releases(paths).of_recipe("scripted-tiny") if one.stage == STAGE][-1]
    reference = drift.reference(paths, release)
    assert reference, f"stage {release.demands.parent} has not left {drift.FILE}: invoke up"
    folder = tmp_path_factory.mktemp("sabotaged")
    model = folder / "model"
    shutil.copytree(checkpoint_of(paths, release), model)
    plugin = model / "sabotage"
    plugin.mkdir()
    shutil.copy(PLUGIN, plugin)
    (plugin / "sparkpin_sabotage-0.dist-info").mkdir()
    for name, text in INFO.items():
        (plugin / "sparkpin_sabotage-0.dist-info" / name).write_text(text)
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    variant = dataclasses.replace(release, env={**release.env, "PYTHONPATH": "/model/sabotage"})
    own = dataclasses.replace(paths, home=folder / "home")  # its containers are no leftovers of the machine's own home
    with (
        started(own, Engine.connect(), variant, model, gpus=False, timeout=ready_timeout(model), say=print) as server,
        Client.unix(server.socket, timeout=1200) as client,
    ):
        server.wait_ready(client)
        length = drafting.drafted(release)
        subject = subject_of(variant, client, server.log, length, gpus=False, reference=reference)
        yield Broken(server, subject)


@pytest.mark.e2e
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.name)
def test_a_sabotage_is_caught_by_name(sabotage: Sabotage, broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "FREED_SECONDS", 1.0)
    broken.by(sabotage.name)
    try:
        names = sorted((*sabotage.caught, *sabotage.passes), key=lambda name: name in READERS)
        seen = broken.verdicts(*names)
    finally:
        broken.by("")
    assert {name for name, verdict in seen.items() if verdict != "ok"} == set(sabotage.caught), seen
    assert sabotage.says in seen[sabotage.caught[0]]


@pytest.mark.e2e
def test_the_same_server_passes_when_it_is_mended(broken: Broken) -> None:
    """Else what was caught may have been the plugin, or what an earlier sabotage left."""
    broken.by("")
    names = {name for sabotage in SABOTAGES for name in (*sabotage.caught, *sabotage.passes)} - set(READERS)
    assert set(broken.verdicts(*sorted(names), *READERS).values()) == {"ok"}


def test_the_documentation_lists_every_sabotage() -> None:
    text = (PROJECT / "docs/smoke.md").read_text()
    row = r"^\| `([\w-]+)` \|.*\| (`[^|]*`) \| (`[^|]*) \|$"
    rows = re.findall(row, text.partition("## What was broken")[2], re.M)
    told = {name: tuple(tuple(re.findall(r"`([\w-]+)`", cell)) for cell in cells) for name, *cells in rows}
    assert told == {sabotage.name: (sabotage.caught, sabotage.passes) for sabotage in SABOTAGES}

"""The reader under fire: what hypothesis makes of recipes is read or refused, in 2 s and 200 MB, and nothing is run.

Seeds are the recipes of ../shared/corpus where they are, and small ones of our own. The quick run takes the same
examples each time; `SPARKPIN_FUZZ=20000 pytest tests/unit/recipes/test_community_fuzz.py` takes as many new ones.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis.configuration
import pytest
import yaml
from foreign_recipe import V1
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from places import PROJECT, copied_to

from sparkpin.cli import add
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests, vllm_command, vllm_flags
from sparkpin.pins.nodes import EXECUTOR, NODES, PER_NODE
from sparkpin.recipes import adopt, check, recipe

SECONDS, BYTES = 2, 200 << 20
EXAMPLES = int(os.environ.get("SPARKPIN_FUZZ", 0))
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
V2 = {
    "model": "acme/sample", "runtime": "vllm", "container": "x:y", "min_nodes": 1, "env": {"NAME": "${NAME}", "A": "b"},
    "metadata": {"description": "on 2 Sparks"}, "defaults": {"port": 8000, "more": "--seed {n}", "n": 1},
    "command": "export B=1\nvllm serve {model} --port {port} {more} --x '{\"a\": {\"b\": 123456}}' ${C:-d} $A | tee l",
}  # fmt: skip
OURS = V2 | {
    "container": "sparkpin/r:base-0123456789ab",
    "metadata": {"sparkpin": {"model": "acme/sample", "model_revision": "unresolved", "stack": "cpu", "stage": "base"}},
}  # fmt: skip
CORPUS = sorted((PROJECT.parent / "shared/corpus").glob("*/*.yaml"))
SEEDS = [*(yaml.safe_dump(one, sort_keys=False) for one in (V1, V2, OURS)), *(path.read_text() for path in CORPUS)]
PARTS = [
    "{", "}", "{{", "}}", "{port}", "{n:{n}}", "{port:>99999999}", "{port!r}", "{port.__class__}", "{port[0]}", "$NAME",
    "${A:-${B-$NAME}}", "$(touch x)", "`touch x`", "'", '"', "\\", "\\\n", " \\ \n", ";", "&&", "|", "&", "<", ">", "#",
    "~", "\n", "\t", "\0", "\x1b[2J", "\x85", "\u2028", "\ue000port\ue001", "\ud83d", "é", ": ", "- ", "&a ", "*a",
    "<<: *a", "!!int x", "!!set {a}", "!!binary '#'", "!!timestamp x", "2026-13-45", "1:1:1:1", ".inf", ".nan",
    "1e999999", "{a,b}", "../..", "-tp 2", "--port abc", "--seed", "--runner pooling", "--speculative-config.a=1",
    """--speculative-config '{"model": {"a": 1}}' """, "--speculative-config '[1]' ",
    "cluster_only: true\n", "recipe_version: '1'\n", 'mods: ["a\\nenv: {B: c}"]\n', 'env: {"B; touch X": 1}\n',
    "'{\"a\": [[[", "include: ", "defaults: [1]\n", "env: {a: {b: 1}}\n", "min_nodes: x\n", "build_args: {a: 1}\n",
    "null", "true",
]  # fmt: skip
LONG = [
    (part, 5000) for part in ("9", "a", "{", "[", "{}", "[[", "a;", "${", "$A\\\n", "--x ", "0xf", "1:", "\\", "' ")
]

hypothesis.configuration.set_hypothesis_home_dir(PROJECT / ".pytest_cache/hypothesis")  # else one of its own


def run(examples: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(
        max_examples=EXAMPLES or examples, derandomize=not EXAMPLES, database=None, deadline=None,
        suppress_health_check=checks, phases=[Phase.generate, Phase.shrink],  # Phase.explain traces each line: slow
    )  # fmt: skip


long = st.sampled_from(LONG).map(lambda part: part[0] * part[1])


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A seed with pieces of it removed, doubled, swapped with those of another, or with hostile ones put in."""
    text = SEEDS[draw(st.integers(0, len(SEEDS) - 1))]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.integers(0, 40)))
        other = SEEDS[draw(st.integers(0, len(SEEDS) - 1))]
        begin = draw(st.integers(0, len(other)))
        own = st.sampled_from([other[begin : begin + 60], text[at:end] * 2])
        part = draw(st.sampled_from(PARTS) | own | long | st.text(max_size=8))
        text = text[:at] + part + text[end:]
    return text


watched: list[str] = []
"""What was started while a recipe was read."""
listening = 0
"""The thread that reads one: other tests of this process may have left some that still talk to each other."""


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if listening == threading.get_ident() and event in STARTS:
        watched.append(f"{event} {arguments!r}"[:300])


sys.addaudithook(hook)


@contextmanager
def limits() -> Iterator[None]:
    """SECONDS of this thread on a CPU and BYTES beyond what there is; a thing that would be started is remembered."""
    global listening
    end = time.thread_time() + SECONDS

    def late(*_: object) -> None:  # the timer counts other threads, too
        if (left := end - time.thread_time()) <= 0:
            raise AssertionError(f"more than {SECONDS} s")
        signal.setitimer(signal.ITIMER_VIRTUAL, max(left, 0.01))

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, late)
    watched.clear()
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, hard))
    listening = threading.get_ident()
    try:
        yield
    finally:
        listening = 0
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        assert watched == []


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    folder = tmp_path_factory.mktemp("fuzz")
    return Paths(copied_to(folder / "project"), folder / "cache", folder / "home")


def trial(paths: Paths, text: str, out: pytest.CaptureFixture[str]) -> str:
    """Everything that is done with a recipe of a stranger; whether it was taken over."""
    path = paths.project.parent / "r.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    target = paths.project / "recipes/r.yaml"
    pins = {file: file.read_bytes() for file in (paths.project / "pins/models").glob("*.*")}
    try:
        with limits():
            stack = manifests.load_stack(paths.project, "spark")
            read = recipe.load(path)
            said = "\n".join(map(str, check.foreign_findings(paths.project, read, stack)))
            assert len(said) < 100_000
            add.add(paths, str(path), no_lock=True)
        assert "\x1b" not in out.readouterr().out
        back = manifests.load_recipe(paths.project, "r")
        model, rendered = adopt.as_served(read)
        left = (EXECUTOR, NODES, *PER_NODE, "--revision", "--chat-template", "--speculative-config",
                *vllm_flags.tls_flags(rendered.argv))  # fmt: skip
        wanted = rendered.argv
        if vllm_flags.flag_value(wanted, "--host") is not None:
            wanted = vllm_flags.set_flag(wanted, "--host", adopt.HERE)
        found = vllm_command.split(vllm_command.fill(back.command, back.defaults, "r"), "r")
        assert vllm_flags.drop_flags(found, *left)[3:] == vllm_flags.drop_flags(wanted, *left)[3:]
        assert back.env == {name: value for name, value in rendered.env.items() if not adopt.useless(name)}
        assert back.model == model
        return "taken over"
    except SparkpinError as error:
        assert len(str(error)) < 5_000
        return "refused"
    finally:
        out.readouterr()
        target.unlink(missing_ok=True)
        for file in (paths.project / "pins/models").glob("*.*"):
            if file not in pins:
                file.unlink()


@given(text=mutated())
@run(80)
def test_a_recipe_that_somebody_changed(paths: Paths, capsys: pytest.CaptureFixture[str], text: str) -> None:
    trial(paths, text, capsys)


def test_what_is_changed_can_be_taken_over(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    assert [trial(paths, text, capsys) for text in SEEDS[:3]] == ["taken over"] * 3

"""A real server, broken in one way after another: the check that is there for it says so, and others do not.

One server of the cpu stack's last stage runs all the time; sabotage/sparkpin_sabotage.py breaks it and mends it again.
Two more serve releases whose files are wrong: those of the image, and those of the checkpoint. Needs what ./install.sh
leaves, the smoke test of the stage below among it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import PROJECT
from sabotaged import Broken, installed, serving

from sparkpin.build.make import checkpoint_of
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke import drift, probes
from sparkpin.smoke.checks import READERS

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


@pytest.fixture(scope="module")
def release() -> Release:
    return [one for one in Releases(Paths.from_env(PROJECT)).of_recipe("scripted-tiny") if one.stage == STAGE][-1]


def below(release: Release) -> drift.Reference:
    reference = drift.reference(Paths.from_env(PROJECT), release)
    assert reference, f"stage {release.demands.parent} has not left {drift.FILE}: invoke up"
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
    monkeypatch.setattr(probes, "FREED_SECONDS", 1.0)
    broken.by(sabotage.name)
    try:
        names = sorted((*sabotage.caught, *sabotage.passes), key=lambda name: name in READERS)
        seen = broken.verdicts(*names)
    finally:
        broken.by("")
    assert {name for name, verdict in seen.items() if verdict != "ok"} == set(sabotage.caught), seen
    assert sabotage.says in seen[sabotage.caught[0]]


def test_the_same_server_passes_when_it_is_mended(broken: Broken) -> None:
    """Else what was caught may have been the plugin, or what an earlier sabotage left."""
    broken.by("")
    names = {name for sabotage in SABOTAGES for name in (*sabotage.caught, *sabotage.passes)} - set(READERS)
    assert set(broken.verdicts(*sorted(names), *READERS).values()) == {"ok"}


EDIT = """
import pathlib, sys, sysconfig
path, old, new = sys.argv[1:]
file = pathlib.Path(sysconfig.get_path("purelib"), path)
text = file.read_text()
assert text.count(old) == 1, text
file.write_text(text.replace(old, new))
(compiled,) = file.parent.glob(f"__pycache__/{file.stem}.*.pyc")  # Python takes it without a look at its source
compiled.unlink()
"""


@contextmanager
def with_image(release: Release, *edit: str) -> Iterator[Release]:
    """The release with another image: one file in it is another. edit: see `WrongFiles.image`."""
    engine = Engine.connect()
    tag = f"sparkpin-sabotage/{uuid.uuid4().hex[:8]}:1"
    command = ["-B", "-c", EDIT, *edit]
    settings = {"entrypoint": "/opt/vllm/bin/python", "user": "0", "network_mode": "none"}
    container = engine.containers.create(release.tag, command, **settings)
    try:
        container.start()
        assert container.wait(timeout=1800)["StatusCode"] == 0, container.logs().decode()
        container.commit(*tag.split(":"))
    finally:
        container.remove(force=True, v=True)
    try:
        yield dataclasses.replace(release, tag=tag)
    finally:
        engine.untag(tag)


def exchange_tensors(path: Path) -> None:
    """Each tensor gets the data of another of its shape, where there is one."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    shapes: dict[str, list[str]] = {}
    for name in sorted(header.keys() - {"__metadata__"}):  # the same ones each time
        shapes.setdefault(str(header[name]["shape"]), []).append(name)
    for names in shapes.values():
        places = [header[name]["data_offsets"] for name in names]
        for name, place in zip(names, places[1:] + places[:1], strict=True):
            header[name]["data_offsets"] = place
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def shuffled_mtp(model: Path) -> None:
    exchange_tensors(model / "model_extra_tensors.safetensors")


def no_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()


@dataclass(frozen=True)
class WrongFiles:
    """image: a file of a mod in site-packages, what stands in it and what is to; checkpoint: what is done to a copy.

    caught: the checks that must fail, each with words of its reason; passes: those that must not.
    """

    name: str
    image: tuple[str, str, str]
    checkpoint: Callable[[Path], None]
    caught: Mapping[str, str]
    passes: tuple[str, ...]


WRONG_FILES = (
    WrongFiles(
        "head-scales-and-mtp",
        ("sparkpin_int8_lm_head/method.py", '_scale", head.row_scale,', '_scale", head.row_scale / 2,'),
        shuffled_mtp,
        {"drift": FAR, "acceptance": "drafted tokens accepted ("},
        ("chat", "tool-call-stream", "logprobs", "mods"),
    ),
    WrongFiles(
        "kv-codes-and-template",
        ("sparkpin_turboquant/naive.py", "device)[codes.long()]", "device)[codes.long() ^ 1]"),
        no_template,
        {"drift": FAR, "chat": "you must provide a chat template", "tool-call-stream": "chat template"},
        ("completion", "mods"),
    ),
)


@pytest.mark.parametrize("wrong", WRONG_FILES, ids=lambda wrong: wrong.name)
def test_wrong_files_of_an_image_and_a_checkpoint_are_caught(
    wrong: WrongFiles, release: Release, tmp_path: Path
) -> None:
    model = copy_of_checkpoint(release, tmp_path / "model")
    wrong.checkpoint(model)
    with (
        with_image(release, *wrong.image) as variant,
        serving(variant, model, tmp_path / "home", below(variant)) as server,
    ):
        seen = server.verdicts(*sorted((*wrong.caught, *wrong.passes), key=lambda name: name in READERS))
    assert {name for name, verdict in seen.items() if verdict != "ok"} == set(wrong.caught), seen
    assert [name for name, words in wrong.caught.items() if words not in seen[name]] == [], seen


def test_the_documentation_lists_every_sabotage() -> None:
    text = (PROJECT / "docs/smoke.md").read_text()
    row = r"^\| `([\w-]+)` \|.*\| (`[^|]*`) \| (`[^|]*) \|$"
    rows = re.findall(row, text.partition("## What was broken")[2], re.M)
    told = {name: tuple(tuple(re.findall(r"`([\w-]+)`", cell)) for cell in cells) for name, *cells in rows}
    assert told == {sabotage.name: (sabotage.caught, sabotage.passes) for sabotage in SABOTAGES}

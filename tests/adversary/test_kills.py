"""Commands that are killed at any moment: what is there afterwards is right, and the same command again succeeds."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout import PROJECT
from checkpoint_samples import BODY, PIN, base_config, fp8_config, write_repository
from kills import SPARKPIN, Victim

from sparkpin.checkpoint.content import RECORD, Hashes
from sparkpin.checkpoint.safetensors import build_header, tensor_nbytes
from sparkpin.checkpoint.write import THREADS
from sparkpin.core.files import PARTIAL, sha256_file
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release, Releases

pytestmark = pytest.mark.slow

RECIPE = "scripted-tiny"
KILLS = 10


@pytest.fixture
def paths(main_job: Releases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A home of our own, with the releases and checkpoints of the machine's."""
    paths = Paths(PROJECT, main_job.paths.cache, tmp_path / "home")
    for name in ("releases", "images", "inputs", "checkpoints"):
        if (main_job.paths.home / name).is_dir():
            shutil.copytree(main_job.paths.home / name, paths.home / name)
    monkeypatch.setenv("SPARKPIN_HOME", str(paths.home))
    return paths


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("task", ["promote", "rollback"])
def test_what_is_current(
    task: str, smoked: dict[str, Release], paths: Paths, record_property: Callable[[str, object], None]
) -> None:
    records, tags = Releases(paths), [smoked[stage].tag for stage in ("v2", "v2-tq")]
    first, then = (Victim(["promote", tag]) for tag in tags)
    first.done()
    then.done()
    wanted = tags[0] if task == "rollback" else tags[1]
    change, back = (Victim(["rollback", "--to", wanted]), then) if task == "rollback" else (then, first)
    for _ in change.kills(KILLS, back.done):
        assert records.current_tag(RECIPE) in tags and not records.readable(RECIPE)[1]
        change.done()
        assert records.current_tag(RECIPE) == wanted
        assert not list((paths.home / "releases" / RECIPE).glob(f"{PARTIAL}*"))
    record_property("trials", KILLS)


def test_checkpoint(paths: Paths, record_property: Callable[[str, object], None]) -> None:
    making = Victim(["build", "--checkpoint-only", "--recipe", RECIPE, "--stage", "v2-tq"])
    folder = paths.home / "checkpoints" / RECIPE
    shutil.rmtree(folder)
    making.done()
    wanted = tree(folder)
    for _ in making.kills(KILLS, lambda: shutil.rmtree(folder)):
        left = tree(folder) if folder.exists() else {}
        named = {name: data for name, data in left.items() if not name.startswith(PARTIAL)}
        assert named in ({}, wanted), "under its name a checkpoint is whole"
        making.done()
        assert tree(folder) == wanted
    record_property("trials", KILLS)


SHARDS, GATE = 14, 80 << 20
"""Shards of the large model, and bytes of the one large tensor in each: 1.17 GB in all."""


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the checkpoint of a model of 1.17 GB appears. Its base is a folder of files with holes: every MB begins
    with bytes of its own, the rest is zeros."""
    project, own = tmp_path / "project", tmp_path / "int4"
    modules = [f"{BODY}{layer}.mlp.shared_expert.down_proj" for layer in range(SHARDS)]
    weights = {f"{module}.weight": ("F8_E4M3", (6, 5)) for module in modules}
    scales = {f"{module}.weight_scale_inv": ("BF16", (2, 2)) for module in modules}
    fp8 = write_repository(tmp_path / "fp8", {"model.safetensors": weights | scales}, fp8_config(), repository="fp8")
    own.mkdir()
    (own / "config.json").write_text(json.dumps(base_config() | {"text_config": {}}))
    for layer, module in enumerate(modules):
        tensors = {
            f"{BODY}{layer}.mlp.gate.weight": ("BF16", (GATE >> 11, 1 << 10)),
            f"{module}.weight": ("BF16", (6, 5)),
        }
        header, _ = build_header((name, *spec) for name, spec in tensors.items())
        with (own / f"model-{layer:05}.safetensors").open("wb") as file:
            file.write(header)
            for at in range(GATE >> 20):
                file.seek(len(header) + (at << 20))
                file.write(f"{layer} {at}".encode())
            file.truncate(len(header) + sum(tensor_nbytes(*spec) for spec in tensors.values()))
    pin = PIN.model_dump(mode="json", exclude={"name", "packed", "smoke", "mtp"})
    pin["hybrid"]["rules"][0]["modules"] = ["model.*.mlp.shared_expert.down_proj"]
    for name, folder in (("int4", own), ("fp8", fp8)):
        pin["repositories"][name] |= {"revision": "unresolved", "folder": str(folder)}
    (project / "pins/models").mkdir(parents=True)
    (project / "pins/models/large.yaml").write_text(json.dumps(pin))
    for name in ("tasks.py", "stages", "dockerfiles", "mods", "pins/stacks", "pins/families.yaml"):
        (project / name).symlink_to(PROJECT / name)
    recipe = (PROJECT / "recipes/scripted-tiny.yaml").read_text().replace("scripted-tiny", "large")
    recipe = recipe.replace("sparkpin/large-int4-AutoRound", PIN.repositories["int4"].repo)
    (project / "recipes").mkdir()
    (project / "recipes/large.yaml").write_text(
        re.sub("model_revision: .*", "model_revision: unresolved", recipe).replace("stage: v2-tq", "stage: hybrid")
    )
    for name in ("project", "cache", "home"):
        monkeypatch.setenv(f"SPARKPIN_{name.upper()}", str(tmp_path / name))
    Victim(["lock", "--model", "large"]).done()
    yield tmp_path / "home/checkpoints/large"
    shutil.rmtree(tmp_path)


def killed_while_writing(line: list[str], number: int, later: float) -> None:
    """A command that is killed so many seconds after it said that it writes the shard of that number."""
    with subprocess.Popen(
        [SPARKPIN, *line], cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr and any(f" ({number} of {SHARDS}, " in said for said in process.stderr)
        time.sleep(later)
        process.kill()


def test_checkpoint_of_a_gigabyte(large: Path, record_property: Callable[[str, object], None]) -> None:
    """At random moments. A shard that the table of hashes knows is not written again; the rest is; and of a build that
    is killed when half of its shards are begun, most of these are kept."""
    line = ["build", "--checkpoint-only", "--recipe", "large"]
    Victim(line).done()  # links the base; the next one hashes it, and those after that know it
    shutil.rmtree(large)
    making = Victim(line)
    making.done()
    pace = making.seconds / SHARDS
    [made] = large.iterdir()
    wanted = {name: row["sha256"] for name, row in json.loads((made / RECORD).read_text())["files"].items()}
    record = (made / RECORD).read_bytes()
    shutil.rmtree(large)
    shares = {}
    for number in [SHARDS // 2 + 1, *random.sample(range(1, SHARDS + 1), KILLS // 2)]:
        killed_while_writing(line, number, random.random() * pace)
        if not made.exists():
            [partial] = large.glob(f"{PARTIAL}*")
            hashes = Hashes.here(Paths.from_env())
            kept = [path.name for path in sorted(partial.glob("*.safetensors")) if hashes.known(path)]
            assert len(kept) >= number - THREADS
            assert {name: sha256_file(partial / name)[0] for name in kept} == {name: wanted[name] for name in kept}
            before = {name: seen_of(partial / name) for name in kept}
            shares[number] = f"{100 * len(kept) / SHARDS:.0f} %"
            if kept and number % 2:  # a disk that lost what it was given
                lost = partial / kept[0]
                with lost.open("r+b") as file:
                    file.seek(GATE // 2)
                    file.write(b"lost")
                del before[lost.name]
            making.done()
            assert {name: seen_of(made / name) for name in before} == before, "it was written again"
        assert (made / RECORD).read_bytes() == record
        assert {name: sha256_file(made / name)[0] for name in wanted} == wanted
        shutil.rmtree(large)
    record_property("trials", KILLS // 2 + 1)
    record_property("kept", shares)


def seen_of(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns

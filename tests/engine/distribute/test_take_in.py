"""Bundles of real images: read by other tools, taken in without a network, never half."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from carried_release import CHECKOUT, Source, carried_release
from checkout import INVOKE
from heard import heard
from private_engine import file_layer, load_image
from ssh_host import SshHost, ssh_host

from sparkpin.build import consistent, make
from sparkpin.build import image as build
from sparkpin.build.consistent import IMPORTS
from sparkpin.build.pair import pair
from sparkpin.build.record import is_imported, layer_file, records_of
from sparkpin.cli import evidence as commands_evidence
from sparkpin.core.errors import DiskError, InputError, IntegrityError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.distribute.bundle import Bundle, open_bundle
from sparkpin.distribute.machine import pull
from sparkpin.distribute.signing import SIGNING_KEY, UntrustedError, ensure_attested
from sparkpin.distribute.transfer import export, import_bundle, require_no_conflict
from sparkpin.host import fingerprint
from sparkpin.host.engine import Engine
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Release, Releases

CHECKPOINT = """
from pathlib import Path
from sparkpin.build.make import checkpoint_of
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Releases
paths = Paths.from_env()
print(checkpoint_of(paths, Releases(paths).all()[0]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with carried_release(tmp_path_factory.mktemp("source")) as source:
        yield source


def write(source: Source, target: Path, release: Release | None = None, *, store: bool = False) -> Path:
    export(source.paths, source.engine, release or source.release, target, store=store)
    return target


@pytest.fixture(scope="module")
def bundle(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(source, tmp_path_factory.mktemp("bundle") / "release.tar", store=True)


def offline(url: str, folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run something in a network namespace without interfaces, with state folders of its own."""
    env = {**os.environ, "DOCKER_HOST": url, "SPARKPIN_HOME": str(folder / "home")}
    env |= {"SPARKPIN_CACHE": str(folder / "cache"), "PYTHONPATH": str(CHECKOUT / "src")}
    argv = ["unshare", "--net", *map(str, command)]
    return subprocess.run(argv, cwd=CHECKOUT, env=env, capture_output=True, text=True)


def files_of(paths: Paths) -> dict[str, bytes]:
    roots = [root for root in (paths.home, paths.cache) if root.exists()]
    return {
        str(p): p.read_bytes()
        for root in roots
        for p in root.rglob("*")
        if p.is_file() and not p.name.endswith(".lock")
    }


def test_other_tools_read_it(source: Source, bundle: Path, tmp_path: Path, empty: Engine) -> None:
    for program, package in (("skopeo", "skopeo"), ("docker", "docker.io")):
        if not shutil.which(program):
            pytest.skip(f"needs {program} (apt-get install {package})")
    skopeo = ["skopeo", "--tmpdir", str(tmp_path)]
    seen = json.loads(subprocess.check_output([*skopeo, "inspect", f"oci-archive:{bundle}"]))
    assert seen["Layers"] == list(source.release.diff_ids) and seen["Architecture"] == "amd64"
    subprocess.run(["docker", "--host", empty.host["DOCKER_HOST"], "load", "-i", bundle], check=True)
    image = empty.image(source.release.tag)
    assert image and image.config_digest == source.release.image


def test_taken_in_without_network(source: Source, bundle: Path, paths: Paths, tmp_path: Path, empty: Engine) -> None:
    """By the tasks, in a checkout without such a recipe: imported, listed, and its checkpoint made."""
    url = empty.host["DOCKER_HOST"]
    tag = source.release.tag
    done = offline(url, tmp_path, *INVOKE, "import", bundle)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(offline(url, tmp_path, *INVOKE, "images", "--json").stdout)
    assert (row["tag"], row["state"], row["image"]) == (tag, "built", source.release.image)
    made = offline(url, tmp_path, sys.executable, "-c", CHECKPOINT)
    assert made.returncode == 0, made.stderr
    assert (Path(made.stdout.strip()) / "model.safetensors.index.json").is_file()
    verified = offline(url, tmp_path, *INVOKE, "verify", tag)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    refused = offline(url, tmp_path, *INVOKE, "reproduce", tag, "--keep")
    assert refused.returncode == 2 and "--trust" in refused.stderr, refused.stderr
    assert offline(url, tmp_path, *INVOKE, "reproduce", tag, "--keep", "--trust").returncode == 0
    assert offline(url, tmp_path, *INVOKE, "import", bundle).returncode == 0
    release = Releases(paths).get(tag)
    assert dataclasses.replace(release, state="built") == source.release
    evidence = Releases(paths).evidence(release)
    assert (evidence / STATEMENT).is_file()
    for diff_id in release.diff_ids:
        assert layer_file(paths, diff_id).read_bytes() == layer_file(source.paths, diff_id).read_bytes()
    (note,) = json.loads((evidence / IMPORTS).read_text())
    assert note["file"] == str(bundle)


def test_what_was_imported_can_be_exported_again(source: Source, paths: Paths, tmp_path: Path, empty: Engine) -> None:
    first = write(source, tmp_path / "first.tar", source.releases[0], store=True)
    release = import_bundle(paths, empty, first).release
    export(paths, empty, release, tmp_path / "second.tar", store=True)
    assert (tmp_path / "second.tar").read_bytes() == first.read_bytes()


def test_a_small_disk_is_told_before_an_export(source: Source, tmpfs: Callable[[str], Path]) -> None:
    disk = tmpfs("1m")
    with pytest.raises(DiskError, match=r"need .* bytes"):
        write(source, disk / "out.tar")
    assert not (disk / "out.tar").exists()


def changed(bundle: Bundle, **values: Any) -> Bundle:
    """As if its last build record said something else."""
    record = bundle.records[-1].model_copy(update=values)
    return dataclasses.replace(bundle, records=(*bundle.records[:-1], record))


RELEASES = [{"inputs": {"stages/base.yaml": "0" * 64}}, {"executable": ("recipes/carried.yaml",)}, {"argv": ("x",)}]
RECORDS = [{"stage": "aaa", "ref": "sparkpin/stack-carried:aaa"}, {"dockerfile": "FROM x\n"}, {"epoch": 1}]


def test_what_another_machine_made_otherwise_is_refused(
    source: Source, bundle: Path, paths: Paths, empty: Engine
) -> None:
    """But for what happened to it there, such as which machine that was."""
    made, tag = source.release.host, source.release.tag
    assert made == fingerprint.read_fingerprint(source.engine.version)
    assert import_bundle(paths, empty, bundle).release.host == made
    with open_bundle(bundle) as opened:
        for change in RELEASES:
            other = dataclasses.replace(opened, release=dataclasses.replace(opened.release, **change))
            with pytest.raises(IntegrityError, match=f"with other {next(iter(change))} than this machine"):
                require_no_conflict(paths, empty, other)
        elsewhere = dataclasses.replace(opened.release, host=made.model_copy(update={"machine": "NVIDIA_DGX_Spark"}))
        require_no_conflict(paths, empty, dataclasses.replace(changed(opened, seconds=7.0, size=7), release=elsewhere))
        for values in RECORDS:
            with pytest.raises(IntegrityError, match=next(iter(values))) as caught:
                require_no_conflict(paths, empty, changed(opened, **values))
            assert tag in caught.value.next_step
    Releases(paths).save(dataclasses.replace(source.release, host=None))
    assert import_bundle(paths, empty, bundle).release.host is None, "the record that is here stays"


def test_another_release_or_image_under_the_tag_stays(
    source: Source, bundle: Path, paths: Paths, empty: Engine
) -> None:
    Releases(paths).save(dataclasses.replace(source.release, image="sha256:" + "0" * 64))
    before = files_of(paths)
    with pytest.raises(IntegrityError, match="with other image"):
        import_bundle(paths, empty, bundle)
    assert files_of(paths) == before and not empty.client.images.list()
    Releases(paths).record_path(source.release).unlink()
    image = load_image(empty, source.release.tag, [file_layer("x", b"x")])
    with pytest.raises(IntegrityError, match="the engine has another image under"):
        import_bundle(paths, empty, bundle)
    assert files_of(paths) == {}
    assert [found.id for found in empty.client.images.list()] == [image.config_digest]


def test_own_builds_take_nothing_for_built_that_was_brought(
    source: Source, tmp_path: Path, signing_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKPIN_SIGNING_KEY", str(signing_key))
    paths = Paths(source.paths.project, source.paths.cache, tmp_path / "home")
    base = source.releases[0]
    import_bundle(paths, source.engine, write(source, tmp_path / "base.tar", base))
    (record,) = records_of(paths, base)
    assert is_imported(paths, record.rendered) and consistent.is_from_elsewhere(paths, base)
    assert build.find_built(paths, source.engine, record.rendered) is None
    assert build.find_built(paths, source.engine, record.rendered, record.config_digest), (
        "`reproduce --keep` knows the digest"
    )
    pairing = pair(paths.project, base.recipe)[0]
    built = build.build_image(paths, source.engine, pairing.rendered)
    assert not is_imported(paths, record.rendered)
    lines = heard()
    assert build.build_image(paths, source.engine, pairing.rendered) == built
    assert [line for line in lines if "is there" in line], lines
    signature = Releases(paths).evidence(base) / SIGNATURE
    assert not signature.exists(), "this machine signs what it built"
    release = make.record_release(paths, source.engine, pairing, built)
    ensure_attested(paths, release)
    assert signature.is_file()
    assert release.created != base.created and not consistent.is_from_elsewhere(paths, release)


def test_statements_of_two_machines_are_not_mixed(source: Source, bundle: Path, paths: Paths, empty: Engine) -> None:
    here = Releases(paths).evidence(source.release)
    here.mkdir(parents=True)
    (here / STATEMENT).write_text("ours")
    import_bundle(paths, empty, bundle)
    assert (here / STATEMENT).read_text() == "ours" and not (here / SBOM).exists() and not (here / SIGNATURE).exists()


def test_verify_reads_what_the_engine_holds(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKPIN_HOME", str(source.paths.home))
    monkeypatch.setenv("SPARKPIN_CACHE", str(source.paths.cache))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    monkeypatch.setattr(commands_evidence, "engine_of", lambda paths: source.engine)
    engine, tag = source.engine, source.release.tag
    commands_evidence.verify(tag)
    lines = capsys.readouterr().out.splitlines()
    results = {line[5:].partition(":")[0].strip(): line[:5].strip() for line in lines[:-1]}
    assert {name for name, result in results.items() if result != "ok"} == {"signature", "published"}, lines
    assert "WRONG" not in results.values()
    with pytest.raises(UntrustedError) as failed:
        commands_evidence.verify(tag, require_signature=True)
    assert SIGNING_KEY in failed.value.next_step, "without a key `--sign` alone leads in a circle"
    engine.untag(tag)
    load_image(engine, tag, [file_layer("other", b"x")])
    try:
        with pytest.raises(IntegrityError):
            commands_evidence.verify(tag)
        assert "WRONG  engine: config digest" in capsys.readouterr().out
    finally:
        engine.tag(records_of(source.paths, source.release)[-1].ref, tag)


FAR = """#!/bin/sh
export SPARKPIN_HOME={home} SPARKPIN_CACHE={cache} DOCKER_HOST={engine} PYTHONPATH={code}
exec {python} -c "from sparkpin.cli.line import main; main()" "$@"
"""
RSYNC = """#!/bin/sh
echo "$@" >>{log}
[ -e {broken} ] || exec {rsync} "$@"
{rsync} --max-size=20k "$@"
exit 30
"""


@pytest.fixture
def far(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshHost]:
    """The source's machine behind a real ssh server, with a checkout in the folder `far`; rsync breaks off where there
    is a file `broken`."""
    rsync, folder = shutil.which("rsync"), tmp_path / "far/.venv/bin"
    if not rsync:
        pytest.skip("needs rsync (apt-get install rsync)")
    folder.mkdir(parents=True)
    names = {"home": source.paths.home, "cache": source.paths.cache, "engine": source.engine.host["DOCKER_HOST"]}
    (folder / "sparkpin").write_text(FAR.format(**names, code=CHECKOUT / "src", python=sys.executable))
    with ssh_host(tmp_path / "ssh", names["engine"]) as host:
        wrapped = RSYNC.format(log=tmp_path / "rsync.log", broken=tmp_path / "broken", rsync=rsync)
        (host.folder / "bin/rsync").write_text(wrapped)
        for script in (folder / "sparkpin", host.folder / "bin/rsync"):
            script.chmod(0o755)
        monkeypatch.setenv("PATH", host.path)
        yield host


def test_from_another_machine(source: Source, paths: Paths, empty: Engine, tmp_path: Path, far: SshHost) -> None:
    """A run that was cut is gone on from; what was damaged meanwhile is refused, and fetched again."""
    base, _, top = source.releases
    url = f"ssh://root@127.0.0.1:{far.port}{tmp_path}/far"
    left, broken = set(Path("/var/tmp").glob("sparkpin-*")), tmp_path / "broken"
    broken.touch()
    with pytest.raises(NetworkError):
        pull(paths, empty, url, base.tag)
    assert not Releases(paths).all() and not empty.client.images.list()
    came = [path for path in paths.work.glob("pull-*/blobs/sha256/*") if path.stat().st_size > 1000]
    came[0].write_bytes(bytes([came[0].read_bytes()[0] ^ 1]) + came[0].read_bytes()[1:])
    broken.unlink()
    with pytest.raises(IntegrityError):
        pull(paths, empty, url, base.tag)
    assert not Releases(paths).all() and not empty.client.images.list()
    assert pull(paths, empty, url, base.tag).release == dataclasses.replace(base, state="built")
    assert pull(paths, empty, url, top.tag).release.tag == top.tag
    image, last = empty.image(top.tag), (tmp_path / "rsync.log").read_text().splitlines()[-1]
    assert image and image.config_digest == top.image
    assert [diff_id[7:] in last for diff_id in top.diff_ids] == [one in base.diff_ids for one in top.diff_ids]
    with pytest.raises(NetworkError):
        pull(paths, empty, url, f"x'; touch {tmp_path}/owned; '")
    far.refuse()
    with pytest.raises(NetworkError):
        pull(paths, empty, url, top.tag)
    with pytest.raises(InputError):
        pull(paths, empty, "ssh://-oProxyCommand=x", top.tag)
    assert set(Path("/var/tmp").glob("sparkpin-*")) == left and not (tmp_path / "owned").exists()

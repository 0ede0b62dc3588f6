"""Releases to a real registry and back: only what lacks is sent, and nothing of what is not true is taken in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from carried_release import Source, carried_release
from local_registry import WORD, LocalRegistry, local_registry

from sparkpin.build.consistent import is_brought, require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.build.pair import pair
from sparkpin.cli import build, up
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.distribute import layout
from sparkpin.distribute import registry as registries
from sparkpin.distribute.registry import publish, pull
from sparkpin.distribute.signing import UntrustedError
from sparkpin.host.engine import Engine
from sparkpin.host.skopeo import AbsentError, Registry
from sparkpin.image import oci
from sparkpin.releases import current
from sparkpin.releases.record import SIGNATURE, Release, Releases


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, signing_key: Path) -> Iterator[Source]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKPIN_SIGNING_KEY", str(signing_key))
        with carried_release(tmp_path_factory.mktemp("source")) as source:
            yield source


@pytest.fixture
def there(tmp_path: Path, signing_key: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRegistry]:
    """A registry whose password this user has, and the maker's key is one that is trusted."""
    allowed = tmp_path / "allowed_signers"
    allowed.write_text(f'maker namespaces="sparkpin" {signing_key.with_suffix(".pub").read_text()}')
    monkeypatch.setenv("SPARKPIN_ALLOWED_SIGNERS", str(allowed))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with local_registry(tmp_path / "registry") as made:
        made.login(tmp_path / "docker")
        yield made


def sent(source: Source, there: LocalRegistry, release: Release | None = None) -> Registry:
    place = Registry.parse(there.url, there.ca)
    return publish(source.paths, source.engine, release or source.release, place, agreed=False)


def nothing_of(paths: Paths, engine: Engine) -> bool:
    return not Releases(paths).all() and not engine.client.images.list() and not list(paths.home.rglob("*.json"))


def test_a_release_goes_over_and_can_be_promoted(
    source: Source, there: LocalRegistry, paths: Paths, empty: Engine
) -> None:
    _, below, top = source.releases
    place = sent(source, there, below)
    assert place.tag == below.tag.rpartition(":")[2] and there.asked("PUT", "manifests") == 2
    blobs = there.asked("PUT", "blobs", "201")
    sent(source, there, below)
    assert there.asked("PUT", "blobs", "201") == blobs, "nothing is sent twice"
    second = sent(source, there, top)
    common = len(set(top.diff_ids) & set(below.diff_ids))
    more = there.asked("PUT", "blobs", "201") - blobs
    own = blobs_of(second) - blobs_of(place)
    assert common and more == len(top.diff_ids) - common + 1 + len(own), "layers, a configuration, what the record adds"

    done = pull(paths, empty, place)
    assert done.release.tag == below.tag and done.release.state == "built"
    assert {check.what: check.result for check in done.checks}["signature"] == "ok"
    asked = there.asked("GET", "blobs")
    done = pull(paths, empty, second)
    layers = len(top.diff_ids) - common
    assert there.asked("GET", "blobs") == asked + 2 + len(blobs_of(second)) + layers, (
        "two configurations, record, layers"
    )
    image = empty.image(top.tag)
    assert image and image.config_digest == top.image and image.diff_ids == top.diff_ids
    assert (Releases(paths).evidence(top) / SIGNATURE).is_file() and not list(paths.work.glob("saved-*"))
    shutil.copytree(source.paths.models, paths.models)
    Releases(paths).update(top.tag, lambda known: dataclasses.replace(known, state="passed"))
    release = Releases(paths).get(top.tag)
    checkpoint_of(paths, release)
    require_consistent(paths, release, finished=True)
    current.promote(paths, empty, release)
    assert Releases(paths).current_tag(top.recipe) == top.tag
    asked = there.asked("GET", "blobs/" + top.diff_ids[-1])
    pull(paths, empty, dataclasses.replace(second, tag="", digest=oci.digest_of(artifact_of(second))))
    assert there.asked("GET", "blobs/" + top.diff_ids[-1]) == asked, "what the engine has is not fetched"


def artifact_of(place: Registry) -> bytes:
    return registries.manifest_at(place, f"{place.reference}{registries.END}")


def blobs_of(place: Registry) -> set[str]:
    """Digests of what the record consists of."""
    return {row.digest for row in layout.read_artifact(artifact_of(place)).layers}


def test_what_is_another_release_is_refused(
    source: Source, there: LocalRegistry, paths: Paths, empty: Engine, tmp_path: Path
) -> None:
    """Image and record go under the names of others; one that subjects another image; a deleted one."""
    other, place = sent(source, there, source.releases[1]), sent(source, there)
    good, moved = artifact_of(place), tmp_path / "moved"
    offer(place, moved, artifact_of(other))
    with pytest.raises(IntegrityError, match="it is of sparkpin"):
        pull(paths, empty, place)
    about = json.loads(good)
    about["subject"] = json.loads(artifact_of(other))["subject"]
    offer(place, moved, oci.text(about))
    with pytest.raises(IntegrityError, match="the image's manifest"):
        pull(paths, empty, place)
    about["subject"]["digest"] = f"sha256:{'0' * 64}"
    offer(place, moved, oci.text(about))
    with pytest.raises(AbsentError, match="0000"):
        pull(paths, empty, place)
    place.fetch(moved, other.reference, "other", 1 << 30)
    place.push(moved, "other", place.reference)
    with pytest.raises(IntegrityError, match="another image"):
        sent(source, there)
    with pytest.raises(AbsentError):
        pull(paths, empty, dataclasses.replace(place, tag="base-0123456789ab"))
    assert nothing_of(paths, empty)


def offer(place: Registry, folder: Path, made: bytes) -> None:
    """Another artifact under the name of a release."""
    place.fetch(folder, f"{place.reference}{registries.END}", "good", 1 << 30)
    (folder / oci.blob(oci.digest_of(made))).write_bytes(made)
    row = oci.described(oci.MANIFEST_TYPE, made) | {"annotations": {oci.REF_NAME: "made"}}
    (folder / oci.INDEX).write_bytes(oci.index_of([row]))
    place.push(folder, "made", f"{place.reference}{registries.END}")


def test_only_a_trusted_signature_is_taken(
    source: Source, there: LocalRegistry, paths: Paths, empty: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, known = sent(source, there), os.environ["SPARKPIN_ALLOWED_SIGNERS"]
    (tmp_path / "nobody").touch()
    monkeypatch.setenv("SPARKPIN_ALLOWED_SIGNERS", str(tmp_path / "nobody"))
    for unsigned in (False, True):
        with pytest.raises(UntrustedError):
            pull(paths, empty, place, unsigned=unsigned)
    monkeypatch.setenv("SPARKPIN_ALLOWED_SIGNERS", known)
    signature = Releases(source.paths).evidence(source.release) / SIGNATURE
    good = signature.read_bytes()
    try:
        signature.unlink()
        place = sent(source, there)
        with pytest.raises(IntegrityError, match="signature"):
            pull(paths, empty, place)
        assert nothing_of(paths, empty)
        done = pull(paths, empty, place, unsigned=True)
        assert {check.what: check.result for check in done.checks}["signature"] == "open"
    finally:
        signature.write_bytes(good)


def test_who_may_read_and_where(
    source: Source, there: LocalRegistry, paths: Paths, empty: Engine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = sent(source, there)
    there.login(tmp_path / "docker", "wrong-word")
    with pytest.raises(NetworkError, match="unauthorized") as refused:
        pull(paths, empty, place)
    assert "login" in refused.value.next_step and "wrong" not in str(refused.value)
    there.login(tmp_path / "docker")
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(NetworkError, match=r"x509|certificate"):
        pull(paths, empty, dataclasses.replace(place, ca=tmp_path / "empty.pem"))
    assert nothing_of(paths, empty)
    said = "".join(capfd.readouterr()) + there.log + "".join(map(str, paths.cache.rglob("*")))
    assert WORD not in said


def test_plain_http_is_for_this_machine(source: Source, paths: Paths, empty: Engine, tmp_path: Path) -> None:
    with local_registry(tmp_path / "open", closed=False) as there:
        place = sent(source, there)
        assert pull(paths, empty, place, unsigned=True).release.tag == source.release.tag
    with (
        local_registry(tmp_path / "far", closed=False, address="127.0.0.2") as there,
        pytest.raises(NetworkError, match="HTTP"),
    ):
        Registry.parse(there.url).manifest(":any")
    assert '"GET' not in there.log


def test_up_takes_what_is_published_and_builds_the_rest(
    source: Source, there: LocalRegistry, empty: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, top = source.releases
    for release in (base, top):
        sent(source, there, release)
    monkeypatch.setattr(build, "at_work", lambda paths: contextlib.nullcontext(empty))
    paths = Paths(source.paths.project, source.paths.cache, tmp_path / "home")
    plan = build.BuildPlan(paths, pair(paths.project, base.recipe), ())
    place = Registry.parse(there.url, there.ca)
    made = build.carry_out(plan, take=partial(up.take_published, plan, place))
    assert [(release.tag, release.image) for release in made] == [(one.tag, one.image) for one in source.releases]
    assert [is_brought(paths, release) for release in made] == [True, False, True]
    asked = there.asked("GET", "manifests")
    assert build.carry_out(plan, take=partial(up.take_published, plan, place)) == made
    assert there.asked("GET", "manifests") == asked, "what was taken needs no network again"
    monkeypatch.delenv("SPARKPIN_ALLOWED_SIGNERS")  # nobody is trusted any more
    assert up.take_published(plan, place, empty) == {}

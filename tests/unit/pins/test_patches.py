"""Patches: what a stack may say of them, when a lock refuses them, and what real git does with them in a build."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import source_samples
import tiny_images
import yaml
from places import PROJECT

from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.pins import manifests
from sparkpin.pins.patches import require_patches, require_wanted
from sparkpin.pins.schema import Stack

Apply = Callable[[Path, list[Path]], None]


def stack_with(project: Path, *patches: dict[str, str], **source: Any) -> Stack:
    data = yaml.safe_load(tiny_images.STACK)
    data["python"]["layers"] = [{"name": "rest", "packages": ["*"]}, {"name": "standin", "packages": ["standin"]}]
    data["python"]["source"] = {"name": "standin", "version": "0.19.1", **source}
    data["patches"] = list(patches)
    tiny_images.write(project / "pins/stacks/tiny.yaml", yaml.safe_dump(data))
    return manifests.load_stack(project, "tiny")


def test_a_patch_is_what_the_stack_says(tmp_path: Path) -> None:
    entry = source_samples.write_patch(tmp_path)
    require_patches(tmp_path, stack_with(tmp_path, entry))
    with pytest.raises(IntegrityError, match=r"answer\.patch: sha256=") as caught:
        require_patches(tmp_path, stack_with(tmp_path, entry | {"sha256": "0" * 64}))
    assert f"patches.0.sha256: {entry['sha256']} into" in caught.value.next_step
    (tmp_path / entry["file"]).unlink()
    with pytest.raises(ManifestError, match=r"patches\.0\.file"):
        require_patches(tmp_path, stack_with(tmp_path, entry))
    page = source_samples.write_patch(tmp_path, "<html>no diff</html>\n")
    with pytest.raises(ManifestError, match="a unified diff"):
        require_patches(tmp_path, stack_with(tmp_path, page))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("file", "https://example.org/pull/1.diff"),
        ("file", "pins/patches/../../etc/passwd.patch"),
        ("file", "/tmp/answer.patch"),
        ("sha256", "0"),
        ("reason", ""),
        ("upstream", "somewhere"),
        ("drop_when", "later"),
        ("drop_when", "vllm"),
        ("drop_when", "vllm >= later"),
        ("drop_when", "vllm ~= 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ManifestError) as caught:
        stack_with(tmp_path, source_samples.write_patch(tmp_path, **{key: value}))
    assert (caught.value.key, caught.value.seen) == (f"patches.0.{key}", value)


@pytest.mark.parametrize("key", ["reason", "upstream", "drop_when", "sha256"])
def test_nothing_of_an_entry_may_be_left_out(tmp_path: Path, key: str) -> None:
    entry = source_samples.write_patch(tmp_path)
    del entry[key]
    with pytest.raises(ManifestError, match=rf"patches\.0\.{key}: saw '\(missing\)'"):
        stack_with(tmp_path, entry)


def test_what_comes_as_a_wheel_is_not_patched(tmp_path: Path) -> None:
    data = yaml.safe_load(tiny_images.STACK) | {"patches": [source_samples.write_patch(tmp_path)]}
    tiny_images.write(tmp_path / "pins/stacks/tiny.yaml", yaml.safe_dump(data))
    with pytest.raises(ManifestError, match=r"`patches` only with `python\.source`"):
        manifests.load_stack(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("version", "dropped"), [("0.19.1", False), ("0.20.0rc1", False), ("0.20.0", True), ("0.20.2+cu130", True)]
)
def test_a_lock_of_a_newer_version_refuses_the_patch(tmp_path: Path, version: str, dropped: bool) -> None:
    stack = stack_with(tmp_path, source_samples.write_patch(tmp_path))
    if not dropped:
        require_wanted(stack, {"standin": version}, "tiny.yaml")
        return
    with pytest.raises(ManifestError, match=f"saw 'standin {version}'".replace("+", r"\+")) as caught:
        require_wanted(stack, {"standin": version}, "tiny.yaml")
    assert caught.value.key == "patches.0.drop_when"
    assert "is to be dropped (the answer is 42; https://example.org/pull/1)" in caught.value.message
    assert caught.value.next_step.startswith("remove patches.0 from tiny.yaml and pins/patches/made-up/answer.patch")


def test_a_condition_on_what_is_not_there_is_refused(tmp_path: Path) -> None:
    stack = stack_with(tmp_path, source_samples.write_patch(tmp_path, drop_when="vlm>=1"))
    with pytest.raises(ManifestError, match="a condition on a distribution of the images"):
        require_wanted(stack, {"standin": "0.19.1"}, "tiny.yaml")


@pytest.fixture
def apply() -> Apply:
    found: Apply = runpy.run_path(str(PROJECT / "dockerfiles/source.py"))["apply_patches"]
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in source_samples.SOURCE.items():
        tiny_images.write(tmp_path / "standin" / name, text)
    return tmp_path / "standin"


def patch_file(folder: Path, text: str = source_samples.PATCH) -> Path:
    tiny_images.write(folder / "000-answer.patch", text)
    return folder / "000-answer.patch"


@pytest.mark.parametrize("checkout", [False, True], ids=["plain", "in-a-checkout"])
def test_a_patch_is_applied(apply: Apply, source: Path, tmp_path: Path, checkout: bool) -> None:
    """In somebody's checkout git skips, with exit status 0, what does not lie where it looks."""
    if checkout:
        source_samples.git(tmp_path, "init", "--quiet")
    apply(source, [patch_file(tmp_path)])
    text = (source / "csrc/answer.cpp").read_text()
    assert "FASTLIB_MORE + 2;" in text
    second = source_samples.PATCH.replace("FASTLIB_MORE + 2;", "+ 3;").replace("FASTLIB_MORE;", "FASTLIB_MORE + 2;")
    apply(source, [patch_file(tmp_path / "second", second)])
    assert "+ 3;" in (source / "csrc/answer.cpp").read_text()


OUTSIDE = source_samples.PATCH.replace("a/csrc/answer.cpp", "a/../../x").replace("b/csrc/answer.cpp", "b/../../x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            source_samples.PATCH.replace("FASTLIB_BASE +", "OTHER +"),
            ["-  return OTHER + FASTLIB_MORE;", "@@ -2,5 +2,5 @@"],
        ),
        (source_samples.PATCH.replace("csrc/answer.cpp", "csrc/gone.cpp"), ["csrc/gone.cpp"]),
        (OUTSIDE, []),
        (None, []),
    ],
    ids=["another-text", "no-such-file", "outside", "in-already"],
)
def test_a_patch_that_does_not_fit_ends_the_build_with_its_hunk(
    apply: Apply, source: Path, tmp_path: Path, text: str | None, said: list[str]
) -> None:
    patch = patch_file(tmp_path, text or source_samples.PATCH)
    if text is None:
        apply(source, [patch])
    before = (source / "csrc/answer.cpp").read_text()
    with pytest.raises(SystemExit, match=r"^000-answer\.patch does not fit the source:") as caught:
        apply(source, [patch])
    assert all(words in str(caught.value) for words in said)
    assert (source / "csrc/answer.cpp").read_text() == before and not (tmp_path / "x").exists()


def test_of_two_patches_the_first_alone_is_said_to_be_in(
    apply: Apply, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = patch_file(tmp_path / "other", source_samples.PATCH.replace("FASTLIB_BASE +", "OTHER +"))
    with pytest.raises(SystemExit, match="does not fit"):
        apply(source, [patch_file(tmp_path), other])
    assert capsys.readouterr().out == "applied 000-answer.patch\n"

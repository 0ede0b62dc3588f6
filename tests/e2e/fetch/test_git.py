"""Archives of Git repositories: the same bytes whoever makes them, and what a wrong address comes to."""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path

import pytest
import source_samples

from sparkpin.core.errors import NetworkError
from sparkpin.fetch import git
from sparkpin.pins.schema import UNRESOLVED, GitTree


@pytest.fixture(autouse=True)
def local_submodules(monkeypatch: pytest.MonkeyPatch) -> None:
    """git refuses submodules by file:// otherwise; real ones come by https://."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.file.allow")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "always")


def test_the_same_bytes_from_another_copy_with_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, commit = source_samples.fastlib(tmp_path / "published")
    git.archive(GitTree(repository=url, commit=commit), commit, tmp_path / "one.tar")
    with tarfile.open(tmp_path / "one.tar") as tar:
        found = {member.name: member for member in tar}
    assert sorted(found) == [".gitmodules", "fastlib/base.h", "fastlib/inner/more.h", "run.sh"]
    assert {(member.uid, member.gid, member.uname, member.mtime) for member in found.values()} == {
        (0, 0, "", 1767225600)
    }

    (tmp_path / "gitconfig").write_text("[core]\nautocrlf = true\neol = crlf\nfileMode = false\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    source_samples.git(tmp_path, "clone", "--quiet", "--bare", url, "copy")
    source_samples.git(tmp_path / "copy", "config", "uploadpack.allowAnySHA1InWant", "true")
    old = os.umask(0o077)
    try:
        other = GitTree(repository=f"file://{tmp_path}/copy", commit=commit)
        git.archive(other, commit, tmp_path / "two.tar")
    finally:
        os.umask(old)
    one, two = ((tmp_path / name).read_bytes() for name in ("one.tar", "two.tar"))
    assert hashlib.sha256(one).hexdigest() == hashlib.sha256(two).hexdigest()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("git-")) == []


def test_modes_and_links_are_kept(tmp_path: Path) -> None:
    url, _ = source_samples.repository(tmp_path / "repo", {"run.sh": "#!/bin/sh\n", "a.txt": ""})
    (tmp_path / "repo/run.sh").chmod(0o755)
    (tmp_path / "repo/link").symlink_to("a.txt")
    source_samples.git(tmp_path / "repo", "add", "--all")
    source_samples.git(tmp_path / "repo", "commit", "--quiet", "--message=more")
    commit = source_samples.git(tmp_path / "repo", "rev-parse", "HEAD")
    git.archive(GitTree(repository=url, commit=commit), commit, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert {m.name: (m.mode, m.linkname) for m in tar} == {
            "a.txt": (0o644, ""),
            "link": (0o777, "a.txt"),
            "run.sh": (0o755, ""),
        }


@pytest.mark.parametrize("annotated", [False, True])
def test_a_tag_is_resolved_to_its_commit(tmp_path: Path, annotated: bool) -> None:
    url, commit = source_samples.repository(tmp_path / "repo", {"a.txt": "a"})
    source_samples.git(tmp_path / "repo", "tag", *(["-a", "-m", "a release"] if annotated else []), "v1.0")
    assert git.commit_of(GitTree(repository=url, commit=UNRESOLVED, tag="v1.0")) == commit
    with pytest.raises(NetworkError, match="has no tag v2"):
        git.commit_of(GitTree(repository=url, commit=UNRESOLVED, tag="v2"))


def test_an_unknown_commit_and_an_unknown_repository(tmp_path: Path) -> None:
    url, _ = source_samples.repository(tmp_path / "repo", {"a.txt": "a"})
    for where in (url, f"file://{tmp_path}/nowhere"):
        with pytest.raises(NetworkError, match="failed"):
            git.archive(GitTree(repository=where, commit="1" * 40), "1" * 40, tmp_path / "a.tar")
        assert not (tmp_path / "a.tar").exists()

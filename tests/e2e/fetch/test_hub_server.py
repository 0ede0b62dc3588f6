"""The local Hub, asked by the real huggingface_hub and by plain HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from hub import byte_range, serve
from hub_repository import scan
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

from sparkpin.core.errors import InputError
from sparkpin.core.files import git_blob_sha1

REPO = "some/model"
LARGE = "model-00001-of-00001.safetensors"
FILES = {
    LARGE: bytes(range(256)) * 4096,
    "config.json": b'{"a": 1}\n',
    "sub/deep/notes with space.txt": "güneşli\n".encode(),
    "empty.txt": b"",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, data in FILES.items():
        file = tmp_path / "root" / REPO / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (tmp_path / "root" / REPO / ".partial-abc").write_bytes(b"left by a killed run")
    return tmp_path / "root"


@pytest.fixture
def url(root: Path) -> Iterator[str]:
    with serve(root) as endpoint:
        yield endpoint


def test_model_info_gives_sizes_and_hashes(url: str) -> None:
    info = huggingface_hub.HfApi(endpoint=url).model_info(REPO, files_metadata=True)
    siblings = {s.rfilename: s for s in info.siblings or []}
    assert {path: s.size for path, s in siblings.items()} == {path: len(data) for path, data in FILES.items()}
    lfs = siblings[LARGE].lfs
    assert lfs is not None and lfs.sha256 == hashlib.sha256(FILES[LARGE]).hexdigest()
    assert siblings["config.json"].lfs is None
    # What `git hash-object` prints for these bytes.
    assert siblings["empty.txt"].blob_id == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def test_file_metadata(url: str) -> None:
    commit = huggingface_hub.HfApi(endpoint=url).model_info(REPO).sha
    for path, etag in [
        (LARGE, hashlib.sha256(FILES[LARGE]).hexdigest()),
        ("config.json", git_blob_sha1(FILES["config.json"])),
    ]:
        got = huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(REPO, path, endpoint=url))
        assert (got.commit_hash, got.etag, got.size) == (commit, etag, len(FILES[path]))


def test_what_is_not_there(url: str, tmp_path: Path) -> None:
    api = huggingface_hub.HfApi(endpoint=url)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("some/other")
    with pytest.raises(RevisionNotFoundError):
        api.model_info(REPO, revision="0" * 40)
    with pytest.raises(EntryNotFoundError):
        huggingface_hub.hf_hub_download(REPO, "absent.json", endpoint=url, cache_dir=tmp_path)
    answer = httpx.get(f"{url}/{REPO}/resolve/main/../../../etc/passwd")
    assert answer.status_code == 404


@pytest.mark.parametrize("path", [LARGE, "config.json"])
@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=2-4", slice(2, 5)),
        ("bytes=5-", slice(5, None)),
        ("bytes=-3", slice(-3, None)),
    ],
)
def test_ranges(url: str, path: str, header: str, span: slice) -> None:
    answer = httpx.get(f"{url}/{REPO}/resolve/main/{path}", headers={"Range": header}, follow_redirects=True)
    size = len(FILES[path])
    begin, end, _ = span.indices(size)
    assert answer.status_code == 206
    assert answer.content == FILES[path][span]
    assert answer.headers["Content-Range"] == f"bytes {begin}-{end - 1}/{size}"


def test_range_past_the_end(url: str) -> None:
    answer = httpx.get(f"{url}/{REPO}/resolve/main/config.json", headers={"Range": "bytes=9-"})
    assert (answer.status_code, answer.headers["Content-Range"]) == (416, "bytes */9")


@pytest.mark.parametrize(
    ("first", "last", "span"),
    [("0", "99", (0, 10)), ("9", "", (9, 10)), ("", "20", (0, 10)), ("", "0", None), ("10", "", None), ("", "", None)],
)
def test_byte_range_of_ten(first: str, last: str, span: tuple[int, int] | None) -> None:
    assert byte_range(first, last, 10) == span


def test_commit_follows_the_content(root: Path) -> None:
    before = scan(root / REPO, REPO).commit
    assert scan(root / REPO, "other/name").commit == before
    (root / REPO / "config.json").write_bytes(b"{}")
    assert scan(root / REPO, REPO).commit != before


def test_server_is_gone_after_the_context(root: Path) -> None:
    with serve(root) as url:
        assert httpx.get(f"{url}/api/models/{REPO}").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/api/models/{REPO}")


def test_empty_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no repositories"), serve(tmp_path):
        pass

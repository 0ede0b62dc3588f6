"""The stand-in for `patch` and `git apply` that a community mod meets in a build."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import PROJECT

SCRIPT = PROJECT / "dockerfiles/patching.py"
FILE = "".join(f"line {number}\n" for number in range(1, 21))
PATCH = """\
diff --git a/pkg/a.py b/pkg/a.py
index 0123456..789abcd 100644
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -3,3 +3,4 @@ context
 line 3
-line 4
+line four
+line four and a half
 line 5
@@ -17,3 +18,2 @@
 line 17
-line 18
 line 19
"""
WANTED = FILE.replace("line 4\n", "line four\nline four and a half\n").replace("line 18\n", "")
BOTH = """\
--- /dev/null
+++ b/pkg/new.txt
@@ -0,0 +1,2 @@
+one
+two
\\ No newline at end of file
--- a/pkg/old.txt
+++ /dev/null
@@ -1 +0,0 @@
-gone
"""


@dataclass
class Place:
    folder: Path

    def run(self, *argv: str, text: str = PATCH) -> subprocess.CompletedProcess[str]:
        env = {"RUNMOD_RECORD": str(self.folder / "record")}
        return subprocess.run(
            [sys.executable, SCRIPT, *argv], cwd=self.folder, env=env, input=text, capture_output=True, text=True
        )

    def record(self) -> list[tuple[str, list[str]]]:
        rows = [json.loads(line) for line in (self.folder / "record").read_text().splitlines()]
        return [(row["kind"], row["files"]) for row in rows]

    @property
    def text(self) -> str:
        return (self.folder / "site/pkg/a.py").read_text()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "site/pkg").mkdir(parents=True)
    (tmp_path / "site/pkg/a.py").write_text(FILE)
    (tmp_path / "site/pkg/old.txt").write_text("gone\n")
    (tmp_path / "fix.patch").write_text(PATCH)
    return Place(tmp_path)


@pytest.mark.parametrize(
    "argv",
    [
        ["patch", "-p1", "-d", "site"],
        ["patch", "-Np1", "--directory=site"],
        ["patch", "-p1", "-d", "site", "-i", "fix.patch"],
        ["patch", "site/pkg/a.py"],
        ["patch", "site/pkg/a.py", "fix.patch"],
        ["git", "apply", "--directory=site", "fix.patch"],
        ["git", "-C", "site", "apply", "-v", "-"],
    ],
    ids=" ".join,
)
def test_a_patch_is_taken(place: Place, argv: list[str]) -> None:
    if "-Np1" in argv:
        assert place.run(*argv).returncode == 2, "joined options are not known, and told so"
        assert place.record() == [("failed", [])]
        return
    done = place.run(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert place.text == WANTED
    assert place.record() == [("applied", ["b/pkg/a.py"])]


def test_files_come_and_go(place: Place) -> None:
    assert place.run("patch", "-p1", "-d", "site", text=BOTH).returncode == 0
    assert (place.folder / "site/pkg/new.txt").read_text() == "one\ntwo"
    assert not (place.folder / "site/pkg/old.txt").exists()
    assert place.run("patch", "-R", "-p1", "-d", "site", text=BOTH).returncode == 0
    assert (place.folder / "site/pkg/old.txt").read_text() == "gone\n"
    assert not (place.folder / "site/pkg/new.txt").exists()


def test_lines_that_moved_are_found(place: Place) -> None:
    file = place.folder / "site/pkg/a.py"
    file.write_text("new first\nand second\n" + FILE)
    assert place.run("patch", "-p1", "-d", "site").returncode == 0
    assert place.text == "new first\nand second\n" + WANTED


def test_nothing_is_written_unless_all_of_it_fits(place: Place) -> None:
    file = place.folder / "site/pkg/a.py"
    changed = FILE.replace("line 18\n", "line eighteen\n")
    file.write_text(changed)
    done = place.run("patch", "-p1", "-d", "site")
    assert done.returncode == 1 and place.text == changed
    assert "site/pkg/a.py does not have these lines:\n@@ -17,3 +18,2 @@\n line 17\n-line 18\n line 19\n" in done.stderr
    assert "line four" not in done.stderr, "the hunk that fits is none of the rejected"
    assert place.record() == [("failed", ["b/pkg/a.py"])]


def test_context_is_not_guessed(place: Place) -> None:
    """GNU patch would take it with fuzz 1, at a place that only resembles the right one."""
    file = place.folder / "site/pkg/a.py"
    file.write_text(FILE.replace("line 3\n", "line three\n"))
    assert place.run("patch", "-p1", "-d", "site").returncode == 1


def test_a_patch_that_is_in_already_is_told(place: Place) -> None:
    place.run("patch", "-p1", "-d", "site")
    done = place.run("patch", "-p1", "-d", "site")
    assert done.returncode == 1 and "has it already" in done.stderr
    assert place.text == WANTED


def test_questions_are_no_changes(place: Place) -> None:
    assert place.run("git", "-C", "site", "apply", "--check", "-").returncode == 0
    assert place.run("git", "-C", "site", "apply", "--reverse", "--check", "-").returncode == 1
    assert place.text == FILE and place.record() == [("question", ["b/pkg/a.py"])]
    place.run("patch", "-p1", "-d", "site")
    assert place.run("patch", "-R", "-p1", "-d", "site", "--dry-run").returncode == 0
    assert place.run("patch", "-p1", "-d", "site", "--dry-run").returncode == 1
    assert place.record()[1:] == [("applied", ["b/pkg/a.py"]), ("refused", ["b/pkg/a.py"])]


@pytest.mark.parametrize(
    ("argv", "text", "said"),
    [
        (["patch", "--merge"], PATCH, "option --merge is not known here"),
        (["git", "checkout", "."], PATCH, "of git there is only `git apply`"),
        (["patch", "-p1", "-d", "site"], "nothing\n", "no unified diff"),
        (["patch", "-p1", "-d", "site"], PATCH[:-10], "the patch is cut off in @@ -17,3 +18,2 @@"),
        (["patch", "-p1"], PATCH, "pkg/a.py is not there"),
        (["git", "apply", "-"], "rename from a\nrename to b\n", "not understood: rename from a"),
    ],
)
def test_what_cannot_be_done_is_a_failure(place: Place, argv: list[str], text: str, said: str) -> None:
    done = place.run(*argv, text=text)
    assert done.returncode in (1, 2) and said in done.stderr
    assert [kind for kind, _ in place.record()] == ["failed"]
    assert place.text == FILE


def test_bytes_that_are_no_utf8_stay(place: Place) -> None:
    file = place.folder / "site/pkg/a.py"
    file.write_bytes(b"# \xff\n" + FILE.encode())
    assert place.run("patch", "-p1", "-d", "site").returncode == 0
    assert file.read_bytes() == b"# \xff\n" + WANTED.encode()

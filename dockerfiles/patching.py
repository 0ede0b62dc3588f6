"""Runs inside a build step in the place of `patch` and of `git apply`, for the run.sh of a community mod.

usage: patching.py patch [OPTIONS] [FILE]      as GNU patch: a unified diff on standard input or behind -i
       patching.py git apply [OPTIONS] [FILE...]

It takes a patch whole or not at all, at any line but without fuzz: every context line must be there. RUNMOD_RECORD is a
file that gets one line of JSON for each patch: what was asked, of which files, and the hunks that do not fit. A script
may hide an exit status; runmod.py reads that file.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NULL = "/dev/null"
NO_END = "\\ No newline at end of file"
ALONE = {  # options without a value that change nothing here
    "-f", "-N", "-s", "-t", "-u", "-v", "-E", "-b", "--batch", "--force", "--forward", "--no-backup-if-mismatch",
    "--quiet", "--silent", "--unified", "--verbose", "--recount", "--unsafe-paths", "--allow-empty",
}  # fmt: skip
VALUED = {"-F", "--fuzz", "-r", "--reject-file", "--whitespace"}  # and these with one


class Unfit(Exception):
    """A hunk that does not fit, or a patch that is not understood."""


@dataclass
class Hunk:
    """start: line of the old file, from 1. old, new: lines with their ends."""

    header: str
    start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    text: str = ""


@dataclass
class Change:
    """One file of a patch; old or new is /dev/null where it comes or goes."""

    old: str
    new: str
    hunks: list[Hunk] = field(default_factory=list)


@dataclass
class Asked:
    """strip: leading folders to leave out; None takes the file's own name. files: patches, "-" for standard input."""

    program: str
    folder: Path
    strip: int | None
    check: bool = False
    reverse: bool = False
    target: str = ""
    files: list[str] = field(default_factory=list)


def parse(text: str) -> list[Change]:
    changes: list[Change] = []
    lines = text.splitlines(keepends=True)
    at = 0
    while at < len(lines):
        line = lines[at]
        if re.match(r"(rename|copy) from |GIT binary patch|Binary files ", line):
            raise Unfit(f"not understood: {line.strip()}")
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            changes.append(Change(name_in(line), name_in(lines[at + 1])))
            at += 2
        elif (found := HUNK.match(line)) and changes:
            at = read_hunk(lines, at, found, changes[-1])
        else:
            at += 1
    if not any(change.hunks for change in changes):
        raise Unfit("no unified diff")
    return changes


def name_in(line: str) -> str:
    return line[4:].rstrip("\n").partition("\t")[0].strip()


def read_hunk(lines: list[str], at: int, found: re.Match[str], change: Change) -> int:
    """The line after the hunk. Its counts say where it ends: a line of a file may look like a header."""
    hunk = Hunk(lines[at].rstrip("\n"), int(found[1]))
    begin, at = at, at + 1
    left = [int(count) if count is not None else 1 for count in (found[2], found[4])]
    while at < len(lines) and (any(left) or lines[at].startswith("\\")):
        line = lines[at]
        if line.startswith("\\"):
            sides = {"-": [hunk.old], "+": [hunk.new]}.get(lines[at - 1][:1], [hunk.old, hunk.new])
            for side in sides:
                side[-1] = side[-1].rstrip("\n")
        elif line[0] in " -+" or line == "\n":
            body = line[1:] if line != "\n" else line  # some editors cut the blank of an empty line
            if line[0] != "+":
                hunk.old.append(body)
                left[0] -= 1
            if line[0] != "-":
                hunk.new.append(body)
                left[1] -= 1
        else:
            break
        at += 1
    if any(left):
        raise Unfit(f"the patch is cut off in {hunk.header}")
    hunk.text = "".join(lines[begin:at])
    change.hunks.append(hunk)
    return at


def turned(change: Change) -> Change:
    back = [Hunk(hunk.header, hunk.start, hunk.new, hunk.old, hunk.text) for hunk in change.hunks]
    return Change(change.new, change.old, back)


def place(name: str, asked: Asked) -> Path:
    if asked.target:
        return asked.folder / asked.target
    parts = PurePosixPath(name).parts
    return asked.folder.joinpath(*(parts[-1:] if asked.strip is None else parts[asked.strip :]))


def fitted(text: str, hunks: list[Hunk]) -> str:
    """The file with all hunks in it; each at its line or the nearest place where all of its old lines are."""
    lines = text.splitlines(keepends=True)
    shift, least = 0, 0
    for hunk in hunks:
        wanted = max(hunk.start - 1, 0) + shift + (0 if hunk.old else 1 if hunk.start else 0)
        fitting = [
            at for at in range(least, len(lines) - len(hunk.old) + 1) if lines[at : at + len(hunk.old)] == hunk.old
        ]
        found = min(fitting, key=lambda at: abs(at - wanted), default=None)
        if found is None:
            raise Unfit(hunk.text)
        lines[found : found + len(hunk.old)] = hunk.new
        shift += len(hunk.new) - len(hunk.old) + found - wanted
        least = found + len(hunk.new)
    return "".join(lines)


def results(text: str, asked: Asked) -> dict[Path, str | None]:
    """What becomes of each file; None: it goes. Unfit with the hunks of every file that do not fit."""
    made: dict[Path, str | None] = {}
    rejected = []
    for change in parse(text):
        back = turned(change)
        now, other = (back, change) if asked.reverse else (change, back)
        path = place(now.new if now.old == NULL else now.old, asked)
        if now.old == NULL:
            if path.exists():
                rejected.append(f"{path} is there already\n")
            made[path] = "".join(line for hunk in now.hunks for line in hunk.new)
            continue
        known = made.get(path)
        if known is None and not path.is_file():
            rejected.append(f"{path} is not there\n{''.join(hunk.text for hunk in now.hunks)}")
            continue
        before = known if known is not None else path.read_bytes().decode("utf-8", "surrogateescape")
        try:
            after = fitted(before, now.hunks)
            made[path] = None if now.new == NULL else after
        except Unfit as error:
            rejected.append(f"{path}{already(before, other)}\n{error}")
    if rejected:
        raise Unfit("".join(rejected))
    return made


def already(text: str, other: Change) -> str:
    try:
        fitted(text, other.hunks)
    except Unfit:
        return " does not have these lines:"
    return " has it already:"


def arguments(argv: list[str]) -> Asked:
    program, words = argv[0], argv[1:]
    asked = Asked(program, Path.cwd(), 1 if program == "git" else None)
    if program == "git":
        while words[:1] == ["-C"]:
            asked.folder, words = asked.folder / words[1], words[2:]
        if words[:1] != ["apply"]:
            raise Unfit("of git there is only `git apply` in a build")
        words = words[1:]
    free: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word == "-" or not word.startswith("-"):
            free.append(word)
        elif re.fullmatch(r"-p\d+", word):
            asked.strip = int(word[2:])
        elif name in ("-p", "--strip"):
            asked.strip = int(value if equals else words.pop(0))
        elif word in ("-R", "--reverse"):
            asked.reverse = True
        elif word in ("--dry-run", "--check"):
            asked.check = True
        elif name in ("-d", "--directory"):
            asked.folder /= value if equals else words.pop(0)
        elif name in ("-i", "--input"):
            asked.files.append(value if equals else words.pop(0))
        elif name in VALUED:
            _ = equals or words.pop(0)
        elif word not in ALONE and not re.fullmatch(r"-F\d+", word):
            raise Unfit(f"option {word} is not known here")
    if program == "git":
        asked.files += free
    else:
        asked.target = free[0] if free else ""
        asked.files += free[1:2]
    asked.files = asked.files or ["-"]
    return asked


def record(kind: str, files: list[str], text: str) -> None:
    with Path(os.environ["RUNMOD_RECORD"]).open("a", encoding="utf-8") as out:
        out.write(json.dumps({"kind": kind, "files": files, "text": text}) + "\n")


def main(argv: list[str]) -> int:
    """A question (--dry-run, --check) that is answered with no is recorded as such: a script may go on from it."""
    try:
        asked = arguments(argv)
    except (Unfit, IndexError, ValueError) as error:
        record("failed", [], f"{' '.join(argv)}: {error}")
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 2
    code = 0
    for name in asked.files:
        text = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        try:
            made = results(text.decode("utf-8", "surrogateescape"), asked)
        except Unfit as error:
            kind = "failed" if not asked.check else "question" if asked.reverse else "refused"
            record(kind, re.findall(r"^\+\+\+ (\S+)", text.decode("utf-8", "replace"), re.M), str(error))
            print(f"{asked.program}: {error}", file=sys.stderr)
            code = 1
            continue
        if not asked.check:
            for path, after in made.items():
                if after is None:
                    path.unlink()
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(after.encode("utf-8", "surrogateescape"))
                print(f"patching file {path}")
            record("applied", re.findall(r"^\+\+\+ (\S+)", text.decode("utf-8", "replace"), re.M), "")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

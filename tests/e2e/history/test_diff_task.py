"""`invoke diff` and `invoke why` as a person runs them: exit codes, and one clear error."""

from __future__ import annotations

import os
import subprocess

import pytest
from bundle_samples import listed
from checkout import INVOKE, Checkout
from evidence_samples import Sample, make_sample

from sparkpin.core.paths import Paths


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout.make(tmp_path_factory.mktemp("diff") / "copy")


@pytest.fixture(scope="module")
def sample(copy: Checkout) -> Sample:
    made = listed(make_sample(copy.home, project=copy.folder))
    assert made.paths == Paths(copy.folder, copy.home / "cache", copy.home / "home")
    return made


def run(copy: Checkout, sample: Sample, *arguments: str) -> subprocess.CompletedProcess[str]:
    return copy.invoke(*arguments, SPARKPIN_HOME=str(sample.paths.home), SPARKPIN_CACHE=str(sample.paths.cache))


def test_the_exit_code_says_whether_they_differ_if_asked(copy: Checkout, sample: Sample) -> None:
    tag = sample.release.tag
    assert run(copy, sample, "diff", tag, ".", "--exit-code").returncode == 0
    path = copy.folder / "recipes/scripted-tiny.yaml"
    text = path.read_text()
    copy.replace("recipes/scripted-tiny.yaml", "max_num_seqs: 4", "max_num_seqs: 8")
    assert run(copy, sample, "diff", tag, ".", "--exit-code").returncode == 1
    assert run(copy, sample, "diff", ".", tag).returncode == 0
    path.write_text(text)


def test_a_reader_that_has_seen_enough_is_no_fault(copy: Checkout, sample: Sample) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = copy.env | {"SPARKPIN_HOME": str(sample.paths.home)}
    command = [*INVOKE, "why", sample.release.tag, "/"]
    done = subprocess.run(command, cwd=copy.folder, env=env, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")

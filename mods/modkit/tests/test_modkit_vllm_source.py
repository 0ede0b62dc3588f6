"""The vLLM that is installed is the one whose source was read: a patched one would show here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import vllm
from sparkpin_modkit import check_vllm

sys.path.append(str(Path(__file__).parent))

import vllm_source

RELEASE = vllm.__version__.partition("+")[0]
SOURCE = vllm_source.Source(Path(vllm.__file__).parents[1])
TOUCHED = {
    name: mod
    for mod, touches in vllm_source.declarations(torch.version.cuda is not None).items()
    for name in touches.get(RELEASE, {})
    if name != "vllm:__version__"  # a generated file, which differs between builds of one release
}


@pytest.mark.parametrize("name", TOUCHED)
def test_source_is_the_one_that_was_read(name: str) -> None:
    found = SOURCE.find(name)
    known = json.loads(vllm_source.DATA.read_text())[RELEASE][name]
    assert found is not None
    assert (found.parameters, found.sha256) == (known["parameters"], known["sha256"])


def test_what_runs_has_what_is_declared() -> None:
    """The installed package as Python sees it, decorators and all, not only its text."""
    for touches in vllm_source.declarations(torch.version.cuda is not None).values():
        if RELEASE in touches:
            assert check_vllm(touches) == RELEASE

"""`invoke prove` at a real server that is no vLLM: llama.cpp's own, of a tiny Llama."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from client_tools import llama_cpp
from gguf_samples import own_weights, write_gguf

from sparkpin.cli import prove as command
from sparkpin.measure.prove.run import CANCELLED, CONCURRENT, CONTROL, READ, WARM, meet

pytestmark = pytest.mark.slow

SMALL = 0.12  # its layers add so little that digits before a prompt hardly move an answer, nor does other text


def test_it_is_asked_in_text_and_its_cache_is_seen_in_its_usage(tmp_path: Path) -> None:
    weights = {
        name: np.ones_like(own) if own.ndim == 1 else own if "embed" in name else own * SMALL
        for name, own in own_weights().items()
    }
    model = write_gguf(tmp_path / "tiny.gguf", weights=weights, llama__context_length=4096)
    with llama_cpp(model) as url, command.at(f"{url}/v1", "") as client:
        met = meet(client)
        assert not met.ids and met.room == 4096 and met.wide > 3, "tokens of bytes, in words"
        found = command.proved(met, url, tmp_path, sessions=2)
    assert (found.verdict, found.finding) == ("cannot tell", None) and "blind" in found.line, found.line
    ways = {one.name: one for one in found.ways}
    assert ways.keys() == {way.name for way in (CONTROL, CONCURRENT, WARM, CANCELLED, READ)}, "it cannot be filled"
    shares = {name: (one.hits or 0) / one.asked for name, one in ways.items()}
    assert min(shares[way.name] for way in (WARM, CANCELLED)) > 0.3 > 0.01 > shares[CONCURRENT.name], shares
    assert max(ways[READ.name].distances) < 1e-3, "what was decoded is read as the same tokens"

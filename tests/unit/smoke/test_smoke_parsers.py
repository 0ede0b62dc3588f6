"""The parsers of the smoke test: server-sent events, Prometheus' text format, mods' lines."""

from __future__ import annotations

import pytest

from sparkpin.smoke import metrics
from sparkpin.smoke.answers import speed_of
from sparkpin.smoke.client import BadStream, Exchange, parse_chunks, parse_events


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        (b"data: a\rdata: b\r\r", ["a\nb"]),
        (b": ping\n\ndata:a\n\n", ["a"]),
        (b"event: x\nid: 1\ndata:  two blanks\n\n", [" two blanks"]),
        (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
        ('data: {"x": "ş: 🙂"}\n\n'.encode(), ['{"x": "ş: 🙂"}']),
        (b"", []),
    ],
)
def test_events(raw: bytes, events: list[str]) -> None:
    assert parse_events(raw) == events


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "no event"),
        (b"data: a\n", "breaks off"),
        (b"data: a\n\ndata: b\n", "breaks off"),
        (b"data: [DONE]\n\ndata: [DONE]\n\n", r"expected \[DONE\] once"),
        (b'data: [DONE]\n\ndata: {"a": 1}\n\n', r"expected \[DONE\] once"),
        (b"data: 1\n\ndata: [DONE]\n\n", "no JSON object"),
    ],
)
def test_streams_that_are_not_what_they_should_be(raw: bytes, reason: str) -> None:
    with pytest.raises(BadStream, match=reason):
        parse_chunks(raw)


METRICS = """# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a}b"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a"} 1.0e+02 1795248592000
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="a"} 1.79e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 161.0
vllm:spec_decode_num_drafts_total{engine="0"} 100.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 60.0
up 1
"""


def test_metrics_are_summed_over_engines() -> None:
    seen = metrics.DraftCounts.read(METRICS)
    assert seen == metrics.DraftCounts(100, 200, 161, (80, 60)) and (seen.share, seen.shares) == (0.805, (0.8, 0.6))
    assert metrics.DraftCounts.read("up 1\n") is None
    assert metrics.total("up soon\n", "up") is None, "a value that is none"


def test_a_share_by_position_says_what_it_is_a_share_of() -> None:
    """Of three drafts one had a single token, for example because a grammar refused the second."""
    assert "which had 1 tokens fewer" in str(metrics.DraftCounts(3, 5, 5, (3, 2)))
    assert "fewer" not in str(metrics.DraftCounts(3, 6, 5, (3, 2)))


def test_the_speed_of_a_test_s_own_requests() -> None:
    """Of whole streamed answers alone."""

    def asked(tokens: int, first: float | None, seconds: float, **more: object) -> Exchange:
        delta = b'data: {"choices": [{"delta": {"role": "assistant", "content": "a"}}]}\n\n'
        usage = b'data: {"choices": [], "usage": {"completion_tokens": %d, "prompt_tokens": 9}}\n\n' % tokens
        body, kind = delta + usage + b"data: [DONE]\n\n", "text/event-stream"
        known = {"request": {}, "status": 200, "body": body, "content_type": kind, "first": first, **more}
        return Exchange("POST", "/v1/chat/completions", seconds=seconds, **known)  # type: ignore[arg-type]

    whole = [asked(11, 0.1, 0.6), asked(21, 0.3, 0.8), asked(31, 0.2, 1.2)]
    others = [
        asked(1000, 0.1, 0.2, content_type="application/json"),
        asked(1000, 0.1, 0.2, status=400),
        asked(1000, 0.1, 0.2, fault="broken off by the test"),
        asked(1000, 0.1, 0.2, body=b"data: 1"),
        asked(1000, None, 0.2),
        asked(1, 0.1, 0.2),
        asked(0, 0.1, 0.2, body=b"data: [DONE]\n\n"),
    ]
    assert speed_of([*whole, *others]) == {"first_token": 0.2, "tokens_a_second": 30.0}
    assert speed_of(others) is None

"""The load of a server in a line, from two readings of its /metrics."""

from __future__ import annotations

from sparkpin.smoke.metrics import acceptance, total

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
MADE, CACHE = "vllm:generation_tokens_total", "vllm:kv_cache_usage_perc"
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


def usage_line(before: str, after: str, seconds: float) -> str:
    """What a metric does not tell is left out."""
    found = []
    if (made := total(after, MADE)) is not None:
        found.append(f"{(made - (total(before, MADE) or 0)) / seconds:.0f} tokens/s")
    found += [
        f"{value:.0f} {what}"
        for name, what in ((RUNNING, "running"), (WAITING, "waiting"))
        if (value := total(after, name)) is not None
    ]
    if (used := total(after, CACHE)) is not None:
        found.append(f"KV cache {used:.1%}")
    if queries := total(after, QUERIES):
        found.append(f"prefix cache hits {(total(after, HITS) or 0) / queries:.0%}")
    if (drafts := acceptance(after)) and drafts.drafted:
        found.append(f"drafts accepted {drafts.share:.0%}")
    return ", ".join(found)

"""The ledger and the proofs as Markdown: `tell.py RESULTS...`, folders that ledger.py left. Standard library only."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEADS, DIM, LAYERS = 2, 256, 2  # KV heads, and layers with full attention, of the trained model
BYTES = {  # of K and V of a token, a layer and a head, as vLLM reserves them; scales are float32
    "bfloat16": 4 * DIM, "fp8": 2 * DIM, "turboquant_k8v4": 388, "turboquant_4bit_nc": 262, "turboquant_k3v4_nc": 230,
    "turboquant_3bit_nc": 198, "int4_per_token_head": 2 * (DIM // 2 + 4), "int8_per_token_head": 2 * (DIM + 4),
    "fp8_per_token_head": 2 * (DIM + 4),
}  # fmt: skip
LEDGER = (
    "change", "against", "KL, nats a token", "same first choice", "perplexity", "KL while decoding", "same words",
    "needles", "drafts accepted", "bytes a token", "tokens that fit",
)  # fmt: skip
PROVED = ("server", "weights", "verdict", "planted faults that would show", "serial = concurrent", "serial = resumed",
          "drafted = read", "drafted = serial", "bound", "control", "hits", "drafted, accepted", "block")  # fmt: skip
FAULTS = ("server", "fault", "its way", "found by", "answers beyond", "furthest, nats", "sound", "verdict")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def span(figure: dict[str, float], form: str) -> str:
    return f"{figure['value']:{form}} [{figure['low']:{form}}, {figure['high']:{form}}]"


def small(figure: dict[str, float]) -> str:
    return span(figure, ".2g")


def bytes_of(found: dict[str, Any]) -> str:
    """Of the trained model; SmolLM2's layers differ in theirs beside `turboquant_*`."""
    if found["weights"] == "smollm2":
        return ""
    kind = found["flags"].get("--kv-cache-dtype", "bfloat16")
    return f"{HEADS * LAYERS * BYTES[kind]:,}" if kind in BYTES else "?"


def accepted(found: dict[str, Any]) -> str:
    asked = found.get("asked", {})
    by = ", ".join(f"{share:.0%}" for share in asked.get("by_position", ()))
    return f"{asked['accepted'] / asked['drafted']:.1%} ({by})" if asked.get("drafted") else ""


def row(found: dict[str, Any], figures: dict[str, Any]) -> tuple[str, ...]:
    texts, skills = figures["texts"][0], {one["name"]: one for one in figures["skills"]}
    perplexity = f"{texts['perplexity_reference']:.2f} -> {texts['perplexity']:.2f}: {span(texts['ratio'], '.4f')}"
    needles = skills.get("needles")
    return (
        f"{found['what']} (`{found['name']}`)", f"`{figures['against']}`", small(texts["kl"]),
        span(texts["top1"], ".1%"), perplexity, small(texts["continued_kl"]), span(texts["continued_same"], ".0%"),
        f"{needles['reference']} -> {needles['release']} of {needles['asked']}" if needles else "",
        accepted(found), bytes_of(found), f"{found['tokens']:,}" if found.get("tokens") else "",
    )  # fmt: skip


def lengths(figures: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Needles and tool calls, of all that were compared with bf16: right of those asked; bf16's own first."""
    own = {one["name"]: {skill["name"]: skill for skill in one["skills"]} for one in figures
           if "skills" in one and one["against"] == "bf16"}  # fmt: skip
    names = list(dict.fromkeys(name for skills in own.values() for name in skills))
    rows = []
    for who, skills in [("bf16", next(iter(own.values()), {})), *own.items()]:
        side = "reference" if who == "bf16" else "release"
        rows.append(
            (who, *(f"{skills[name][side]} of {skills[name]['asked']}" if name in skills else "" for name in names))
        )
    return ("server", *names), rows


def alike(distances: list[float]) -> str:
    """How many are the same to the bit, and the furthest of the others."""
    same, furthest = distances.count(0), max(distances, default=0)
    return f"{same} of {len(distances)}" + (f"; {furthest:.2g}" if furthest else "") if distances else ""


def proof(found: dict[str, Any], record: dict[str, Any], serial: list[float], more: str = "") -> tuple[str, ...]:
    ways = {one["name"]: one for one in record["ways"]}
    far = {name: one["distances"] for name, one in ways.items()}
    resumed = [name for name in ("warm", "cancelled", "evicted") if name in ways]
    bounds = sorted({bound for one in ways.values() for bound in one["bounds"]})
    drafted = f"{record['drafted']:,}, {record.get('accepted') or 0:,}" if record["drafted"] else ""
    return (
        f"{found['what']}{more}", found["weights"], record["verdict"], f"{record['planted']} of 6",
        alike(far.get("concurrent", [])), alike([one for name in resumed for one in far[name]]),
        alike(far.get("read", [])), alike(serial), f"{bounds[0]:.2g} .. {bounds[-1]:.2g}" if bounds else "",
        f"{record['control']:.2g}", f"{sum(ways[name]['hits'] or 0 for name in resumed):,}", drafted,
        str(record.get("block", "")),
    )  # fmt: skip


def planted(server: str, one: dict[str, Any]) -> tuple[str, ...]:
    if "record" not in one:
        return (server, one["fault"], "", "", "", "", "", one.get("error") or one["skipped"])
    record = one["record"]
    way = next(way for way in record["ways"] if way["name"] == one["way"])
    beyond = sum(far > bound for far, bound in zip(way["distances"], way["bounds"], strict=True))
    finding = record["finding"]
    return (
        server, one["fault"], one["way"], finding["way"] if finding else "", f"{beyond} of {len(way['distances'])}",
        f"{max(way['distances'], default=0):.2g}", f"{max(one['sound'], default=0):.2g}", record["line"],
    )  # fmt: skip


def main(folders: list[Path]) -> None:
    lines = [line for folder in folders for line in (folder / "results.jsonl").read_text().splitlines() if line]
    results = {found["name"]: found for found in map(json.loads, lines)}
    files = [
        file for folder in folders if (file := folder / "figures.json").exists()
    ]  # calls 1 and 3 have proofs alone
    figures = [one for file in files for one in json.loads(file.read_text())]
    rows = [row(results[one["name"].removesuffix("+long")], one) for one in figures if "texts" in one]
    print(table(LEDGER, rows), "\n")
    print(table(*lengths(figures)), "\n")
    serial = {one["name"]: one["serial"] for one in figures if "serial" in one}
    proofs = []
    for found in results.values():
        proofs += [proof(found, found["record"], serial.get(found["name"], []))] if "record" in found else []
        proofs += [proof(found, found["crossing"], [], ", crossing")] if "crossing" in found else []
    print(table(PROVED, proofs), "\n")
    faults = [planted(found["name"], one) for found in results.values() for one in found.get("faults", ())]
    print(table(FAULTS, faults), "\n")
    refused = [
        (found["name"], found["what"], (found.get("why") or found["error"])[:300])
        for found in results.values() if "error" in found
    ]  # fmt: skip
    print(table(("server", "what", "its last error"), refused), "\n")
    for found in results.values():
        asked = found.get("asked") or {}
        ready = f"{found['name']}: ready {found.get('ready_s')} s, done {found.get('done_s')} s"
        print(f"- {ready}; block {found.get('block')}; {found.get('backends')};",
              f"{asked.get('tokens_a_second', '')} tokens/s of one stream beside others;",
              f"tool calls right: {asked.get('tool_calls', '')};",
              f"mods: {', '.join(sorted({one['mod'] for one in found.get('mods', ()) if 'mod' in one}))}")  # fmt: skip


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])

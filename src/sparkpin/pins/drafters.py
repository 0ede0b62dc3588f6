"""A recipe's second model: what --speculative-config must say of it, and what it must be to draft for the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.pins.schema import DRAFTER, Drafts, Recipe
from sparkpin.pins.vllm_command import MODEL_PATH, file_of, flag_value, parse_flags, set_flag
from sparkpin.pins.vllm_flags import SPECULATION, Flags

FLAG, TOKENS = SPECULATION, "num_speculative_tokens"
SHORT = "--spec-model"
SHORTS: Mapping[str, str] = {SHORT: "model", "--spec-method": "method", "--spec-tokens": TOKENS}
"""Of vLLM 0.32 and later: keys of FLAG, and refused beside them there."""
BY_USERS, BY_USERS_SINCE = f"{TOKENS}_per_batch_size", "0.32.0"
"""The key of FLAG that drafts less or more with other numbers of users; of the stacks' vLLM the first that knows it."""
PATH = f"{MODEL_PATH}/{DRAFTER}"  # of a checkpoint's folder vLLM reads no weights but those that lie in it directly
WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")  # the methods whose name stands for their model, too
NGRAM = ("ngram", "[ngram]")  # one method, and the only one that is known by its model alone
MODEL_CONFIG = "config.json of the model that it drafts for"
ADDED: Mapping[str, int] = {"target_layer_ids": 1, "dspark_target_layer_ids": 1, "eagle_aux_hidden_state_layer_ids": 0}
"""What vLLM adds to a key's numbers of layers. The sum counts layers: the model's last one has their number."""
NUMBER, NUMBERS, OBJECT = "a positive whole number", "a list of whole numbers", "a JSON object"
KINDS: Mapping[str, Callable[[Any], bool]] = {
    NUMBER: lambda value: type(value) is int and value > 0,
    NUMBERS: lambda value: isinstance(value, list) and all(type(item) is int for item in value),
    OBJECT: lambda value: isinstance(value, Mapping),
}


def speculation(argv: Sequence[str]) -> dict[str, Any]:
    """Empty where nothing is drafted."""
    return Flags(argv, "the command", {}).json(FLAG)


def second_model(plan: Mapping[str, Any]) -> Any:
    """The draft model that a plan names; None where it names none but its method (vLLM 0.32, config/speculative.py)."""
    model, method = plan.get("model"), plan.get("method")
    by_name = (model in NGRAM and method in (None, *NGRAM)) or (model in WITHOUT_MODEL and method == model)
    return None if by_name else model


def require_plan(argv: Sequence[str], file: object) -> None:
    """ManifestError where --speculative-config is no JSON object, or the draft model in it no text."""
    model = Flags(argv, str(file), {}).json(FLAG).get("model")
    if not isinstance(model, str | None):
        raise ManifestError(file, f"command, {FLAG}: model", model, "a repository of the Hub, as text")


def command_faults(words: Sequence[str], recipe: Recipe) -> Iterator[ManifestError]:
    """What is wrong with the draft model that a recipe's own command names."""
    file = file_of(recipe)
    try:
        plan = speculation(words)
    except ManifestError as fault:
        yield ManifestError(file, "command", fault.seen, fault.wanted)
        return
    model = plan.get("model")
    if short := flag_value(words, SHORT):
        yield ManifestError(file, f"command, {SHORT}", short, f"a drafter as `model` of {FLAG} (docs/drafters.md)")
        return
    if recipe.drafter is None:
        if second_model(plan) not in (None, MODEL_PATH):
            step = f"write `drafter: {model}` there, and its pin in pins/models/ (docs/drafters.md)"
            wanted = "a drafter that the recipe names in `drafter`: what is not pinned is not there in a container"
            yield ManifestError(file, f"command, {FLAG}: model", model, wanted, next_step=step)
        return
    if model not in (recipe.drafter, PATH):
        yield ManifestError(file, f"command, {FLAG}: model", model, f"{recipe.drafter!r}, the recipe's drafter")
    tokens = plan.get(TOKENS)
    if type(tokens) is not int or tokens < 1:
        yield ManifestError(file, f"command, {FLAG}: {TOKENS}", tokens, "how many tokens a draft has")


def mounted(argv: Sequence[str], recipe: Recipe) -> list[str]:
    """The words with the drafter where a container has it."""
    return set_flag(argv, FLAG, {**speculation(argv), "model": PATH}) if recipe.drafter else list(argv)


def require_used(recipe: Recipe, argv: Sequence[str]) -> None:
    """ManifestError where a stage sets another way of drafting over the recipe's."""
    if recipe.drafter and speculation(argv).get("model") != PATH:
        wanted = f"a stage that leaves {FLAG} to the recipe, such as hybrid or v2-drafter"
        raise ManifestError(file_of(recipe), "stage", recipe.stage, wanted)


def with_lengths(argv: Sequence[str], lengths: Mapping[int, int]) -> list[str]:
    """The words with a recipe's `drafts_by_users`; as they are where nothing drafts (`unused_lengths`)."""
    with contextlib.suppress(ManifestError):  # no JSON, which is told of the command
        if lengths and (plan := speculation(argv)):
            ends = [*(users - 1 for users in list(lengths)[1:]), list(lengths)[-1]]  # vLLM carries on with the last
            rows = [[users, end, tokens] for (users, tokens), end in zip(lengths.items(), ends, strict=True)]
            return set_flag(argv, FLAG, {**plan, TOKENS: max(lengths.values()), BY_USERS: rows})
    return list(argv)


def drafted_with(plan: Mapping[str, Any], users: int) -> int:
    """Tokens that vLLM drafts in a step of so many users; 0 for none. plan: of --speculative-config, without faults."""
    below = [tokens for start, _, tokens in sorted(plan.get(BY_USERS) or ()) if start <= users]
    return below[-1] if below else int(plan.get(TOKENS) or 0)


def unknown_lengths(seen: object, vllm: str, file: object, key: str) -> Iterator[ManifestError]:
    """That the stack's vLLM knows no draft lengths by users. seen: those, under that key; vllm: its version, "" for an
    unknown one."""
    from packaging.version import Version

    if seen and vllm and Version(vllm) < Version(BY_USERS_SINCE):
        wanted = f"a stack with vLLM {BY_USERS_SINCE} or newer: {vllm} drafts as much with any number of users"
        yield ManifestError(file, key, seen, wanted, next_step=f"leave it out, and set {TOKENS} alone")


def length_faults(plan: Mapping[str, Any], file: object, key: str) -> Iterator[ManifestError]:
    """What vLLM 0.32 and 0.33 refuse of BY_USERS, or serve otherwise than it says (v1/spec_decode/dynamic/utils.py).

    plan: of --speculative-config; key: that set it.
    """
    if (rows := plan.get(BY_USERS)) is None:
        return
    parts = sorted(rows) if isinstance(rows, list) and all(map(KINDS[NUMBERS], rows)) else []
    whole = bool(parts) and all(len(part) == 3 and part[0] <= part[1] and part[2] >= 0 for part in parts)
    if not whole or parts[0][0] != 1 or any(one[1] >= after[0] for one, after in pairwise(parts)):
        wanted = "[first, last, tokens], of numbers of users from 1 on that do not overlap: [[1, 7, 2], [8, 8, 1]]"
        yield ManifestError(file, key, rows, wanted)
    elif type(tokens := plan.get(TOKENS)) is int and (most := max(part[2] for part in parts)) > tokens:
        wanted = f"at most {tokens} tokens, {TOKENS} beside it: vLLM would draft no more"
        yield ManifestError(file, key, most, wanted)


def unused_lengths(recipe: Recipe, argv: Sequence[str]) -> Iterator[ManifestError]:
    """What is wrong with `drafts_by_users` where nothing drafts. argv: of the recipe's own stage."""
    if recipe.drafts_by_users and not any(flag.sets(FLAG) for flag in parse_flags(argv)[1]):
        wanted = f"a stage or a command that drafts by {FLAG}, such as stage mtp: {recipe.stage} does not"
        yield ManifestError(file_of(recipe), "drafts_by_users", recipe.drafts_by_users, wanted)


def method_faults(plan: Mapping[str, Any], drafts: Drafts, file: str) -> Iterator[ManifestError]:
    """plan: of --speculative-config."""
    method = plan.get("method")
    if method != drafts.method:
        yield ManifestError(file, f"{FLAG}: method", method, f"{drafts.method!r}, as the drafter's pin says")
    if plan[TOKENS] > drafts.tokens:
        wanted = f"at most {drafts.tokens}, as the drafter's pin says"
        yield ManifestError(file, f"{FLAG}: {TOKENS}", plan[TOKENS], wanted)


def read(
    config: Mapping[str, Any], key: str, kind: str, file: str, where: str = "config.json", *, needed: bool = False
) -> Any:
    """A value of a config.json, None where there is none and none is needed. kind: one of KINDS."""
    value = config.get(key)
    if (needed or value is not None) and not KINDS[kind](value):
        raise ManifestError(file, f"{where}: {key}", value, kind)
    return value


def pair_faults(
    plan: Mapping[str, Any], target: Mapping[str, Any], drafter: Mapping[str, Any], file: str
) -> Iterator[ManifestError]:
    """Why the model of one config.json cannot draft for that of another. plan: of --speculative-config; file: of the
    drafter's pin.

    vLLM 0.32: config/speculative.py, v1/worker/gpu_model_runner.py, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py,
    models/llama_eagle3.py, models/qwen3_dflash.py.

    Raises ManifestError for a value of another kind: anybody may have written either file.
    """
    text = read(target, "text_config", OBJECT, file, MODEL_CONFIG) or target

    def differ(key: str, seen: object, wanted: object) -> Iterator[ManifestError]:
        if seen != wanted:
            yield ManifestError(file, f"config.json: {key}", seen, f"{wanted}, as the model has that it drafts for")

    if plan.get("use_heterogeneous_vocab") is not True:  # else vLLM maps one vocabulary to the other
        yield from differ("vocab_size", drafter.get("vocab_size"), text.get("vocab_size"))
    if plan["method"] == "draft_model":
        return
    own = drafter.get("target_hidden_size") or drafter.get("hidden_size")
    yield from differ("target_hidden_size or hidden_size", own, text.get("hidden_size"))
    inner = read(drafter, "dflash_config", OBJECT, file) or read(drafter, "eagle_config", OBJECT, file) or {}
    for key, added in ADDED.items():
        if not (numbers := read(inner, key, NUMBERS, file) or read(drafter, key, NUMBERS, file)):
            continue
        layers = read(text, "num_hidden_layers", NUMBER, file, MODEL_CONFIG, needed=True)
        if (highest := max(numbers)) > layers - added:
            wanted = f"at most {layers - added}: the model that it drafts for has {layers} layers"
            yield ManifestError(file, f"config.json: {key}", highest, wanted)
    block = read(inner, "block_size", NUMBER, file) or read(drafter, "block_size", NUMBER, file)
    if plan["method"] == "dflash" and block and plan[TOKENS] >= block:
        wanted = f"at most {block - 1}: a block of {block} begins with the model's own token"
        yield ManifestError(file, TOKENS, plan[TOKENS], wanted)

"""A recipe's second model: what --speculative-config must say of it, and what it must be to draft for the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.pins.schema import DRAFTER, Drafts, Recipe
from sparkpin.pins.vllm_command import MODEL_PATH, file_of, flag_value, set_flag
from sparkpin.pins.vllm_flags import SPECULATION, Flags

FLAG, TOKENS = SPECULATION, "num_speculative_tokens"
SHORT = "--spec-model"
SHORTS: Mapping[str, str] = {SHORT: "model", "--spec-method": "method", "--spec-tokens": TOKENS}
"""Of vLLM 0.32 and later: keys of FLAG, and refused beside them there."""
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
        yield ManifestError(file, "command", fault.got, fault.expected)
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

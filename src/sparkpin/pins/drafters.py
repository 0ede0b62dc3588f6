"""A recipe's second model: what --speculative-config must say of it, and what it must be to draft for the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparkpin.core.errors import ManifestError
from sparkpin.pins.schema import DRAFTER, Drafts, Recipe
from sparkpin.pins.vllm_flags import MODEL_PATH, SPECULATION, Flags, flag_value, set_flag

FLAG, TOKENS = SPECULATION, "num_speculative_tokens"
PATH = f"{MODEL_PATH}/{DRAFTER}"  # of a checkpoint's folder vLLM reads no weights but those that lie in it directly
WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")  # the methods whose name stands for their model, too
BY_NAME = {  # part of a drafter's name or architecture -> its method
    "eagle3": "eagle3", "eagle": "eagle", "dflash": "dflash", "museglimmerassistant": "dflash",
    "dspark": "dspark", "mtp": "mtp", "gemma4_assistant": "mtp", "gemma4_unified_assistant": "mtp",
}  # fmt: skip
BLOCKS = ("block_size", "dspark_block_size")
NGRAM = ("ngram", "[ngram]")  # one method, and the only one that is known by its model alone


def speculation(argv: Sequence[str], file: object = "the command") -> dict[str, Any]:
    """What --speculative-config says, empty where nothing is drafted.

    ManifestError where it is no JSON object, or the draft model in it no text. file: has the command.
    """
    plan = Flags(argv, str(file), {}).json(FLAG)
    if not isinstance(model := plan.get("model"), str | None):
        raise ManifestError(file, f"{FLAG}: model", model, "a repository of the Hub, as text")
    return plan


def second_model(plan: Mapping[str, Any]) -> Any:
    """The draft model that a plan names; None where it names none but its method (vLLM 0.32, config/speculative.py)."""
    model, method = plan.get("model"), plan.get("method")
    by_name = (model in NGRAM and method in (None, *NGRAM)) or (model in WITHOUT_MODEL and method == model)
    return None if by_name else model


def require_pinned(words: Sequence[str], recipe: Recipe) -> None:
    """ManifestError where a recipe's own command names a draft model that is not its `drafter`."""
    file, plan = recipe.file, speculation(words, recipe.file)
    model, tokens = plan.get("model"), plan.get(TOKENS)
    if short := flag_value(words, "--spec-model"):
        raise ManifestError(file, "command, --spec-model", short, f"a drafter as `model` of {FLAG} (docs/drafters.md)")
    if recipe.drafter is None:
        if second_model(plan) not in (None, MODEL_PATH):
            step = f"write `drafter: {model}` there, and its pin in pins/models/ (docs/drafters.md)"
            expected = "the recipe's `drafter`, since a container holds only what is pinned"
            raise ManifestError(file, f"command, {FLAG}: model", model, expected, next_step=step)
    elif model not in (recipe.drafter, PATH):
        raise ManifestError(file, f"command, {FLAG}: model", model, f"{recipe.drafter!r}, the recipe's drafter")
    elif type(tokens) is not int or tokens < 1:
        raise ManifestError(file, f"command, {FLAG}: {TOKENS}", tokens, "how many tokens a draft has")


def mounted(argv: Sequence[str], recipe: Recipe) -> list[str]:
    """The words with the drafter where a container has it."""
    return set_flag(argv, FLAG, {**speculation(argv), "model": PATH}) if recipe.drafter else list(argv)


def require_used(recipe: Recipe, argv: Sequence[str]) -> None:
    """ManifestError where a stage sets another way of drafting over the recipe's."""
    if recipe.drafter and speculation(argv).get("model") != PATH:
        expected = f"a stage that leaves {FLAG} to the recipe, such as hybrid or v2-drafter"
        raise ManifestError(recipe.file, "stage", recipe.stage, expected)


def method_of(plan: Mapping[str, Any], repo: str, config: Mapping[str, Any]) -> str:
    """How a second model drafts: the plan's own word, else as vLLM finds it (0.32, config/speculative.py), by its name
    and architecture. vLLM's words for the MTP layers of single models all mean `mtp`."""
    if method := plan.get("method"):
        return "mtp" if str(method).endswith("_mtp") else str(method)
    about = " ".join((repo.rpartition("/")[2], str(config.get("model_type")), *(config.get("architectures") or ())))
    found = (method for word, method in BY_NAME.items() if word in about.lower())
    return next(found, "draft_model")


def longest_draft(method: str, config: Mapping[str, Any]) -> int | None:
    """Tokens of a draft at most, by the drafter's config.json; None where that says nothing. Of DFlash's block the
    first is no draft but the token before it."""
    parts = (config.get("dflash_config"), config)
    sizes = [part[key] for part in parts if isinstance(part, Mapping) for key in BLOCKS if part.get(key)]
    if method not in ("dflash", "dspark") or not sizes or type(sizes[0]) is not int:
        return None
    return sizes[0] - 1 if method == "dflash" else sizes[0]


def method_faults(plan: Mapping[str, Any], drafts: Drafts, file: str) -> Iterator[ManifestError]:
    """plan: of --speculative-config."""
    if (method := plan.get("method")) != drafts.method:
        yield ManifestError(file, f"{FLAG}: method", method, f"{drafts.method!r}, as the drafter's pin says")
    if type(tokens := plan.get(TOKENS)) is int and tokens > drafts.tokens:
        expected = f"at most {drafts.tokens}, as the drafter's pin says"
        yield ManifestError(file, f"{FLAG}: {TOKENS}", tokens, expected)


def pair_faults(
    plan: Mapping[str, Any], target: Mapping[str, Any], drafter: Mapping[str, Any], file: str
) -> Iterator[ManifestError]:
    """Why the model of one config.json cannot draft for that of another. plan: of --speculative-config; file: of the
    drafter's pin. What vLLM 0.32 refuses by itself when it starts (layers, block size) is left to it.
    """
    text, method = (
        one["text_config"] if isinstance(one.get("text_config"), Mapping) else one for one in (target, drafter)
    )
    sizes = {}
    if plan.get("use_heterogeneous_vocab") is not True:  # else vLLM maps one vocabulary to the other
        sizes["vocab_size"] = method.get("vocab_size")
    if plan["method"] != "draft_model":  # an assistant of Gemma 4 says backbone_hidden_size (vLLM 0.32, gemma4_mtp.py)
        of_target = drafter.get("target_hidden_size") or drafter.get("backbone_hidden_size")
        sizes["hidden_size"] = of_target or method.get("hidden_size")
    for key, got in sizes.items():
        if got != (expected := text.get(key)):
            yield ManifestError(file, f"config.json: {key}", got, f"{expected}, as the model has that it drafts for")

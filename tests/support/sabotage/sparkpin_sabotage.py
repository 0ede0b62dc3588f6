"""A plugin of vLLM that breaks a running server in one way at a time, and mends it again. Runs beside vLLM.

Each process of the server looks at FOLDER/sabotage: the name of what is to be broken, nothing for nothing. What it has
done it says in FOLDER/done-api or done-engine. What must be a file or a flag of a release (a template, a parser, a
scale) is broken where vLLM keeps what it read from it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("SPARKPIN_SABOTAGE", "/run/sparkpin"))
WINDOW = 600
USED = 0.1  # standard deviation of a state that requests have left
Undo = list[Callable[[], object]]


INFO = {
    "METADATA": "Metadata-Version: 2.1\nName: sparkpin-sabotage\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\nsabotage = sparkpin_sabotage:register\n",
}


def install(folder: Path) -> None:
    """This plugin in a new folder, as an installed distribution looks there."""
    info = folder / "sparkpin_sabotage-0.dist-info"
    info.mkdir(parents=True)
    for file in Path(__file__).parent.glob("*.py"):
        shutil.copy(file, folder)
    for name, text in INFO.items():
        (info / name).write_text(text)


def switch(folder: Path, name: str, roles: tuple[str, ...] = ("api", "engine"), seconds: float = 300.0) -> None:
    """Return once each process says that it is so; "" mends it. No answer to an earlier call is taken.

    folder: FOLDER of the server; roles: of its processes; seconds: the engine looks for objects while it may be busy.
    RuntimeError where one could not do it, or said nothing in time.
    """
    wanted = f"{name} {time.monotonic_ns()}"
    new = folder / "sabotage.new"
    new.write_text(wanted)
    new.rename(folder / "sabotage")
    until = time.monotonic() + seconds
    for role in roles:
        while not (said := text_of(folder / f"done-{role}")).startswith(wanted):
            if time.monotonic() > until:
                raise RuntimeError(f"{role} did not do {wanted!r}: {said}")
            time.sleep(0.05)
        if said != wanted:
            raise RuntimeError(said)


def register() -> None:
    """Entry point of ``vllm.general_plugins``."""
    for beside in ("sparkpin_cache_faults", "sparkpin_gpu_faults"):  # where a test has put them
        with contextlib.suppress(ImportError):
            ENGINE.update(importlib.import_module(beside).FAULTS)
    threading.Thread(target=watch, daemon=True).start()


def watch() -> None:
    role, known, undo = ("engine" if "EngineCore" in multiprocessing.current_process().name else "api"), "", list[Any]()
    while True:
        time.sleep(0.02)
        wanted = text_of(FOLDER / "sabotage")
        if wanted == known:
            continue
        known, said = wanted, wanted
        try:
            while undo:
                undo.pop()()
            name = wanted.partition(" ")[0]
            if role == "api":
                reset_metrics()
            if name in (ENGINE if role == "engine" else API):
                (ENGINE if role == "engine" else API)[name](undo)
            elif name and name not in ENGINE | API:
                raise KeyError(name)
        except BaseException:
            said += traceback.format_exc()
        done = FOLDER / f"done-{role}.new"
        done.write_text(said)
        done.rename(FOLDER / f"done-{role}")


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def alive(kind: type) -> Iterator[Any]:
    """vLLM freezes what it made at the start, and frozen objects are in no list of the collector's."""
    gc.unfreeze()
    return (one for one in gc.get_objects() if issubclass(type(one), kind))  # asks no dead proxy for its class


def put(undo: Undo, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until it is undone. A static method stays one."""
    former = vars(owner).get(name, getattr(owner, name)) if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, staticmethod(value) if isinstance(former, staticmethod) else value)
    undo.append(lambda: setattr(owner, name, former))


def reset_metrics() -> None:
    """As after a start: what an earlier sabotage left in the counters is no evidence against this one."""
    from prometheus_client import REGISTRY, Counter

    for collector in {*REGISTRY._collector_to_names}:
        if isinstance(collector, Counter):
            for child in (*collector._metrics.values(),) if collector._labelnames else (collector,):
                child.reset()


def runner() -> Any:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return next(alive(CPUModelRunner))


def serving() -> Any:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    return next(one for one in alive(OpenAIServingChat) if type(one) is OpenAIServingChat)


def output(undo: Undo, module: Any, change: Callable[[Any], Any]) -> None:
    """Change what a linear layer gives, as other weights would: on the CPU they are packed away and out of reach."""
    handle = module.register_forward_hook(
        lambda _, __, out: (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
    )
    undo.append(handle.remove)


def head_scales(undo: Undo) -> None:
    scale = runner().model.lm_head.weight_row_scale
    scale.mul_(0.5)
    undo.append(lambda: scale.mul_(2))


def head_rows(undo: Undo) -> None:
    codes = runner().model.lm_head.weight_int8
    former = codes.clone()
    codes.copy_(former.roll(1, 0))
    undo.append(lambda: codes.copy_(former))


def mtp_shuffled(undo: Undo) -> None:
    output(undo, runner().drafter.model.model.fc, lambda out: out.roll(1, -1))


def shared_scales(undo: Undo) -> None:
    for layer in runner().model.model.layers:
        for linear in (layer.mlp.shared_expert.gate_up_proj, layer.mlp.shared_expert.down_proj):
            output(undo, linear, lambda out: out * 2)


def kv_codes(undo: Undo) -> None:
    from sparkpin_turboquant import naive

    def dequantise(codes: Any, norms: Any, bits: int = 4) -> Any:
        table = naive.centroids(codes.device)
        table[[3, 5]] = table[[5, 3]]
        return table[codes.long()] * norms.float().unsqueeze(-1)

    put(undo, naive, "dequantise_rotated", dequantise)


def kv_window(undo: Undo) -> None:
    from sparkpin_turboquant import cpu

    former = cpu.slots_of

    def slots_of(blocks: Any, length: int, size: int) -> Any:
        slots = former(blocks, length, size)
        slots[:-WINDOW] = slots[0]
        return slots

    put(undo, cpu, "slots_of", slots_of)


def state_kept(undo: Undo) -> None:
    """And every block holds another state, as after days of requests: which ones came before is no matter then."""
    import torch
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder as Builder

    chance = torch.Generator().manual_seed(1)
    layers = [layer for layer in runner().model.modules() if isinstance(layer, MambaBase)]
    assert layers
    for state in (state for layer in layers for state in layer.kv_cache):
        state.copy_(torch.randn(state.shape, generator=chance) * USED)

    former = Builder.build

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = former(self, *args, **kwargs)
        for name in ("has_initial_state", "prefill_has_initial_state"):
            if getattr(made, name, None) is not None:
                setattr(made, name, torch.ones_like(getattr(made, name)))
        return made

    put(undo, Builder, "build", build)


def hot(undo: Undo) -> None:
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.sampler import Sampler

    drafts, plain = rejection_sampler.apply_sampling_constraints, Sampler.apply_temperature
    put(undo, rejection_sampler, "apply_sampling_constraints", lambda logits, *more: drafts(logits / 40, *more))
    put(undo, Sampler, "apply_temperature", lambda logits, *more: plain(logits.div_(40), *more))


def nan_logprobs(undo: Undo) -> None:
    from vllm.v1.sample.sampler import Sampler

    former = Sampler.compute_logprobs
    put(undo, Sampler, "compute_logprobs", lambda logits: former(logits) * float("nan"))


def never_freed(undo: Undo) -> None:
    from vllm.v1.engine.core import EngineCore

    kept: list[tuple[Any, list[str]]] = []
    former = EngineCore.abort_requests
    put(undo, EngineCore, "abort_requests", lambda core, ids: kept.append((core, ids)))
    undo.append(lambda: [former(core, ids) for core, ids in kept])


def no_template(undo: Undo) -> None:
    chat = serving()
    put(undo, chat, "chat_template", None)
    for tokenizer in {id(one): one for one in (chat.renderer.tokenizer, chat.renderer.get_tokenizer())}.values():
        put(undo, tokenizer, "chat_template", None)


def parser(undo: Undo, tools: str, reasoning: str) -> None:
    from vllm.parser import ParserManager

    chat = serving()
    named = ParserManager.get_parser(
        tool_parser_name=tools,
        reasoning_parser_name=reasoning,
        enable_auto_tools=True,
        model_name=chat.model_config.model,
        tokenizer=chat.renderer.tokenizer,
    )
    put(undo, chat, "parser_cls", named)


def no_end(undo: Undo) -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    for processor in alive(InputProcessor):
        put(undo, processor, "generation_config_fields", {})
        put(undo, processor.renderer, "get_eos_token_id", lambda: None)


def bytes_apart(undo: Undo) -> None:
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer as Detokenizer

    put(undo, Detokenizer, "_protected_step", lambda self, token: self.tokenizer.decode([token], False))


def nameless(undo: Undo) -> None:
    from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall as Delta

    former = Delta.__init__
    put(undo, Delta, "__init__", lambda self, **values: former(self, **{**values, "name": None}))


ENGINE: dict[str, Callable[[Undo], None]] = {
    "head-scales": head_scales,
    "head-rows": head_rows,
    "mtp-shuffled": mtp_shuffled,
    "shared-scales": shared_scales,
    "kv-codes": kv_codes,
    "kv-window": kv_window,
    "state-kept": state_kept,
    "hot": hot,
    "nan-logprobs": nan_logprobs,
    "never-freed": never_freed,
}
API: dict[str, Callable[[Undo], None]] = {
    "no-template": no_template,
    "tool-parser": lambda undo: parser(undo, "hermes", "qwen3"),
    "no-reasoning-parser": lambda undo: parser(undo, "qwen3_coder", ""),
    "no-end": no_end,
    "bytes-apart": bytes_apart,
    "nameless": nameless,
}

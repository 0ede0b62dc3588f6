"""One stage in one process: vLLM with random weights, its points, where its time goes, which experts it reaches."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import buckets
from uniform import Uniform

from stages import BATCHES, LONGEST, Stage, arguments

WARM, WINDOWS, WINDOW = 8, 4, 16
"""Steps: before measuring, and 4 windows of 16."""

TURNS, SAID, HEARD = 4, 64, 500
"""Turns of a conversation after its first prompt; tokens of each answer, and of what is sent after it."""

CHANCES = (0.5, 0.7, 0.8, 0.9)
"""That a draft is accepted when those before it were, imposed."""

PROFILED = 4
IDS = (1000, 200_000)


class Measured:
    def __init__(self, stage: Stage, out: Path, label: str, *, compiled: bool = False, **more: Any) -> None:
        from vllm import LLM

        self.stage, self.out, self.label, self.count = stage, out, label, 0
        self.running: list[str] = []
        self.random = random.Random(0)
        begin = time.monotonic()
        llm = LLM(**(arguments(stage, compiled=compiled) | more))
        self.engine = llm.llm_engine
        config = self.engine.vllm_config
        self.ids = (min(IDS[0], 100), min(IDS[1], config.model_config.get_vocab_size() - 1))
        self.found: dict[str, Any] = {
            "stage": stage.name,
            "what": stage.what,
            "compiled": compiled,
            "ready_s": round(time.monotonic() - begin, 1),
            "imposed_tokens_a_step": stage.accepted if stage.drafts else 1,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "async": config.scheduler_config.async_scheduling,
            "decode": {},
            "first_token_s": {},
        }
        self.save()

    @property
    def runner(self) -> Any:
        """Of one process; there is none here where the model runs in others."""
        return self.engine.model_executor.driver_worker.worker.model_runner

    def save(self) -> None:
        (self.out / f"{self.label}.json").write_text(json.dumps(self.found, indent=1) + "\n")

    def case(self, run: Callable[[], None], what: str) -> None:
        """A case that fails says how, the others go on."""
        begin = time.monotonic()
        try:
            run()
        except Exception:
            self.found.setdefault("errors", {})[what] = traceback.format_exc()[-2000:]
            self.abort()
        self.found.setdefault("took_s", {})[what] = round(time.monotonic() - begin, 2)
        print("CASE", self.label, what, self.found["took_s"][what], flush=True)
        self.save()

    def add(self, context: int, batch: int) -> None:
        self.running = []
        for _ in range(batch):
            self.ask(self.random.choices(range(*self.ids), k=context), 1024)

    def ask(self, prompt: list[int], most: int) -> None:
        """most: tokens of the answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            # Sampled: the greedy tokens of random weights soon are the same in all sequences, and so their experts.
            temperature=1,
            max_tokens=most,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.count += 1
        self.running.append(self.engine.add_request(f"r{self.count}", {"prompt_token_ids": prompt}, params))

    def abort(self) -> None:
        self.engine.abort_request(self.running, internal=True)
        for _ in range(4):  # what was in flight
            self.engine.step()

    def step(self) -> tuple[float, int]:
        """The next step with tokens: when it ended, and how many."""
        while True:
            outputs = self.engine.step()
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            if tokens:
                return time.perf_counter(), tokens

    def decode(self, context: int, batch: int) -> None:
        found = self.timed(context, batch)
        found["tokens_per_s"] = batch * self.found["imposed_tokens_a_step"] / found["step_ms"] * 1e3
        self.found["decode"][f"{context}:{batch}"] = found
        print("POINT", self.label, context, batch, found, flush=True)

    def lengths(self, context: int, batch: int) -> None:
        """Steps with each number of drafted tokens, at each chance; tokens are those that were seen to be accepted."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        chance_of_each = self.runner.rejection_sampler.synthetic_conditional_rates
        rows = self.found.setdefault("lengths", [])
        for drafted in range(LONGEST + 1):
            scheduler.dynamic_sd_lookup = [drafted] * (1 + max(BATCHES))
            for chance in CHANCES if drafted else (0.0,):
                chance_of_each.fill_(chance)
                found = self.timed(context, batch)
                found["tokens_per_s"] = batch * found["seen_tokens_a_step"] / found["step_ms"] * 1e3
                rows.append({"context": context, "batch": batch, "drafted": drafted, "chance": chance, **found})
                print("LENGTH", self.label, rows[-1], flush=True)

    def timed(self, context: int, batch: int) -> dict[str, Any]:
        """Milliseconds of steps that decode `batch` sequences of `context` tokens, and the tokens of each."""
        import filled

        filled.Fill.on = True
        self.add(context, batch)
        for _ in range(WARM):
            self.step()
        ends, counts = zip(*(self.step() for _ in range(1 + WINDOWS * WINDOW)), strict=True)
        self.abort()
        steps = [b - a for a, b in itertools.pairwise(ends)]
        windows = [
            (ends[at + WINDOW] - ends[at]) / WINDOW * 1e3 for at in range(0, WINDOWS * WINDOW, WINDOW)
        ]  # milliseconds a step
        return {
            "step_ms": statistics.median(windows),
            "windows_ms": windows,
            "single_ms": [min(steps) * 1e3, statistics.median(steps) * 1e3, max(steps) * 1e3],
            "seen_tokens_a_step": sum(counts[1:]) / len(steps) / batch,
        }

    def first_token(self, context: int, batch: int, repeat: int = 1) -> None:
        """Seconds until the last of `batch` prompts, sent at once, has its first token."""
        import filled

        filled.Fill.on = False
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            self.add(context, batch)
            got: set[str] = set()
            while len(got) < batch:
                got |= {output.request_id for output in self.engine.step() if output.outputs[0].token_ids}
            times.append(time.perf_counter() - begin)
            self.abort()
        self.found["first_token_s"][f"{context}:{batch}"] = times
        print("FIRST", self.label, context, batch, times, flush=True)

    def turns(self, context: int) -> None:
        """A conversation: each prompt is the last one, its answer and some more. Seconds to the first token."""
        prompt: list[int] = self.random.choices(range(*self.ids), k=context)
        rows = []
        for _ in range(1 + TURNS):
            begin, answer, first, cached = time.perf_counter(), [], 0.0, None
            self.running = []
            self.ask(prompt, SAID)
            finished = False
            while not finished:
                for output in self.engine.step():
                    answer += output.outputs[0].token_ids
                    first = first or (time.perf_counter() - begin if answer else 0.0)
                    cached = output.num_cached_tokens if cached is None else cached
                    finished = output.finished
            rows.append({"prompt": len(prompt), "cached": cached, "first_token_s": first})
            prompt = [*prompt, *answer, *self.random.choices(range(*self.ids), k=HEARD)]
        self.found.setdefault("turns", {})[str(context)] = rows
        print("TURNS", self.label, rows, flush=True)

    def profile(self, context: int, batch: int) -> None:
        """The GPU's kernels in a few steps: their names, times and the part of vLLM that launched them."""
        import filled
        from torch.profiler import ProfilerActivity, profile

        filled.Fill.on = True
        self.add(context, batch)
        for _ in range(WARM):
            self.step()
        with self.scopes(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
            for _ in range(PROFILED):
                self.step()
        self.abort()
        trace = Path(f"/tmp/{os.getpid()}.json")
        seen.export_chrome_trace(str(trace))
        rows = buckets.rows_of(json.loads(trace.read_text())["traceEvents"])
        trace.unlink()
        with gzip.open(self.out / f"{self.label}-{context}-{batch}.rows.gz", "wt") as file:
            json.dump(rows, file)

    @contextmanager
    def scopes(self) -> Iterator[None]:
        """Names for what the profiler sees: the model, its head and sampling, the drafter."""
        from torch.profiler import record_function

        speculator = getattr(self.runner, "speculator", None)
        objects = [(self.runner, name) for name in ("execute_model", "sample_tokens", "sample")]
        objects += [(speculator, "propose")] if speculator is not None else []
        for object_, name in objects:
            original = getattr(object_, name)

            def scoped(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                with record_function(f"scope:{_name}"):
                    return _original(*args, **kwargs)

            setattr(object_, name, scoped)
        try:
            yield
        finally:
            for object_, name in objects:
                delattr(object_, name)

    def routing(self, context: int, batch: int, steps: int = 4) -> None:
        """How many of a layer's experts one step reaches, as routed and as its own router would; is everything finite?

        First with CUDA graphs, to see that each replay draws anew, then without.
        """
        import filled
        import torch
        import vllm._custom_ops as ops

        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        routed = ops.topk_softmax
        own = routed.own if isinstance(routed, Uniform) else routed

        def topk(weights: torch.Tensor, ids: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            own(weights, ids, *args, **kwargs)
            chosen = ids.clone()
            routed(weights, ids, *args, **kwargs)
            seen.append((ids.clone(), chosen))

        logits: list[bool] = []
        compute = self.runner.model.compute_logits

        def finite(*args: Any, **kwargs: Any) -> Any:
            found = compute(*args, **kwargs)
            logits.append(bool(found.isfinite().all()))
            return found

        filled.Fill.on = True
        self.add(context, batch)
        for _ in range(WARM):
            self.step()
        draws = set()
        for _ in range(steps):
            self.step()
            if isinstance(routed, Uniform) and routed.log is not None:
                torch.cuda.synchronize()
                draws.add(str(routed.log[:batch].tolist()))
        manager = self.runner.cudagraph_manager
        ops.topk_softmax, manager._graphs_captured = topk, False
        self.runner.model.compute_logits = finite
        try:
            for _ in range(steps):
                self.step()
        finally:
            ops.topk_softmax, manager._graphs_captured = routed, True
            del self.runner.model.compute_logits
        self.abort()
        counts = [(len(ids), ids.unique().numel(), chosen.unique().numel()) for ids, chosen in seen]
        self.found.setdefault("routing", {})[f"{context}:{batch}"] = {
            str(tokens): {
                "layers": sum(1 for n, *_ in counts if n == tokens),
                "experts": statistics.mean(reached for n, reached, _ in counts if n == tokens),
                "own": statistics.mean(reached for n, _, reached in counts if n == tokens),
            }
            for tokens in sorted({n for n, *_ in counts})
        } | ({"draws": len(draws), "of_steps": steps} if draws else {})
        self.found["finite"] = all(logits) and bool(logits)
        print("ROUTING", self.label, self.found["routing"], self.found["finite"], flush=True)

    def free(self) -> None:
        import torch

        self.found["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        self.save()
        gc.collect()

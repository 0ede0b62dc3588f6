"""Train `trained-tiny` on one GPU, in less than ten minutes.

usage: python train.py DATA OUT [--seconds 440] [--seed 1]

DATA is of corpus.py. OUT gets model.safetensors, config.json and log.jsonl. The learning rate falls with the time that
is left, so the number of steps, which the log has, depends on the GPU.

Matrices by Muon (Jordan, https://kellerjordan.github.io/posts/muon/), the rest by Adam.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import model
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

LONG_FROM = 0.72  # share of the time after which sequences are long
STAGES = ((2048, 32, 12), (8192, 8, 4))  # tokens, sequences a step, of them tasks
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
AHEAD = 3  # tokens behind a sequence that the MTP layer's second draft needs
MUON, ADAM = 0.02, 3e-3  # learning rates
WARM, COOL = 100, 0.45  # steps in which they rise; share of the time in which they fall
MTP, MTP_AGAIN, BALANCE, CONTEXT = 0.3, 0.1, 0.01, 0.3  # weights of losses; of tokens of tasks that are no answers


class Data:
    """Batches on the GPU: text from anywhere, whole sequences of tasks. The last 32 rows of tasks are for testing."""

    def __init__(self, folder: Path, device: str, seed: int) -> None:
        self.text = torch.from_numpy(np.load(folder / "text.npy").view(np.int16)).to(device)
        self.held = torch.from_numpy(np.load(folder / "held-out.npy").view(np.int16)).to(device)
        self.tasks, self.answers = {}, {}
        for length, _, _ in STAGES:
            ids = np.load(folder / f"tasks-{length}.npy")
            wanted = np.unpackbits(np.load(folder / f"answers-{length}.npy"))[: ids.size].reshape(ids.shape)
            pad = ((0, 0), (0, AHEAD))
            self.tasks[length] = torch.from_numpy(np.pad(ids, pad, mode="edge").view(np.int16)).to(device)
            self.answers[length] = torch.from_numpy(np.pad(wanted, pad)).to(device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def batch(self, length: int, count: int, tasks: int) -> tuple[Tensor, Tensor]:
        """Tokens [count, length + 3], and the weight of each as a target."""
        size = length + AHEAD
        starts = torch.randint(len(self.text) - size, (count - tasks, 1), generator=self.generator, device=self.device)
        text = self.text[starts + torch.arange(size, device=self.device)]
        rows = torch.randint(len(self.tasks[length]) - 32, (tasks,), generator=self.generator, device=self.device)
        weights = torch.ones(count, size, device=self.device)
        weights[count - tasks :] = CONTEXT + (1 - CONTEXT) * self.answers[length][rows]
        return torch.cat([text, self.tasks[length][rows]]).long() & 0xFFFF, weights


def loss_of(p: dict[str, Tensor], ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """To be made small, and nats of the next token, of both drafts, and the balance of the experts."""
    length = ids.shape[1] - AHEAD
    h, balance = model.hidden(ids[:, :length], p, DTYPE)
    total, told = balance * BALANCE, []
    for ahead, share in ((1, 1.0), (2, MTP), (3, MTP_AGAIN)):
        if ahead > 1:
            h, own = model.draft(h, ids[:, ahead - 1 : ahead - 1 + length], p)
            total = total + own * BALANCE
        nats = model.losses(h.flatten(0, 1), p["lm_head.weight"], ids[:, ahead : ahead + length].flatten())
        mass = weights[:, ahead : ahead + length].flatten()
        told.append((nats * mass).sum() / mass.sum())
        total = total + share * told[-1]
    return total, torch.stack([*told, balance / len(model.CONFIG["layer_types"])]).detach()


class Optimizer:
    """rates: [Muon's, Adam's], on the GPU so that a captured step sees changes."""

    def __init__(self, p: dict[str, Tensor]) -> None:
        self.rates = torch.zeros(2, device=next(iter(p.values())).device)
        self.names = list(p)
        self.p = p
        few = ("embed_tokens", "lm_head", "conv1d", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b")
        self.groups: dict[tuple[int, int], list[str]] = {}
        for name, value in p.items():
            if value.dim() >= 2 and not any(part in name for part in few):
                rows, columns = value.shape[-2:]
                self.groups.setdefault((min(rows, columns), max(rows, columns)), []).append(name)
        ours = {name for names in self.groups.values() for name in names}
        self.others = [name for name in p if name not in ours]
        self.first = {name: torch.zeros_like(value) for name, value in p.items()}
        self.second = {name: torch.zeros_like(p[name]) for name in self.others}
        self.count = torch.zeros((), device=self.rates.device)

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor]) -> None:
        self.count += 1
        every = [grads[name] for name in self.names]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(every)))
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(every, scale)
        p, first, second = ([table[name] for name in self.others] for table in (self.p, self.first, self.second))
        own = [grads[name] for name in self.others]
        torch._foreach_lerp_(first, own, 0.1)
        torch._foreach_mul_(second, 0.95)
        torch._foreach_addcmul_(second, own, own, 0.05)
        size = self.rates[1] * torch.sqrt(1 - 0.95**self.count) / (1 - 0.9**self.count)
        updates = torch._foreach_div(first, torch._foreach_add(torch._foreach_sqrt(second), 1e-9))
        torch._foreach_sub_(p, torch._foreach_mul(updates, size))
        for names in self.groups.values():
            moments = [self.first[name] for name in names]
            torch._foreach_lerp_(moments, [grads[name] for name in names], 0.05)
            mixed = torch._foreach_lerp([grads[name] for name in names], moments, 0.95)
            flat = [one.reshape(-1, *one.shape[-2:]) for one in mixed]
            wide = [one if one.shape[-2] <= one.shape[-1] else one.transpose(-1, -2) for one in flat]
            made = orthogonal(torch.cat(wide)).split([len(one) for one in wide])
            for name, update in zip(names, made, strict=True):
                value = self.p[name]
                turned = update if value.shape[-2] <= value.shape[-1] else update.transpose(-1, -2)
                grown = max(1.0, value.shape[-2] / value.shape[-1]) ** 0.5
                value.mul_(1 - self.rates[0] * 0.05).sub_(turned.reshape(value.shape) * (self.rates[0] * grown))


@model.compiled
def orthogonal(x: Tensor) -> Tensor:
    """Newton-Schulz: [n, rows, columns], rows at most columns, to singular values of about 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.to(DTYPE)
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32) + 1e-7).to(x.dtype)
    for _ in range(5):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.float()


def rates(progress: float, count: int) -> tuple[float, float]:
    share = min(1.0, (count + 1) / WARM, max(0.02, (1 - progress) / COOL))
    return MUON * share, ADAM * share


class Step:
    """One step of training for one shape; on a GPU it is captured once and replayed."""

    def __init__(
        self,
        p: dict[str, Tensor],
        optimizer: Optimizer,
        data: Data,
        stage: tuple[int, int, int],
        say: Callable[[str], None],
    ) -> None:
        self.data, self.stage = data, stage
        self.ids, self.weights = data.batch(*stage)
        self.told = torch.zeros(4, device=self.ids.device)
        names, values = list(p), list(p.values())

        def run() -> None:
            total, told = loss_of(p, self.ids, self.weights)
            optimizer.step(dict(zip(names, torch.autograd.grad(total, values), strict=True)))
            self.told.copy_(told)

        self.run = run
        if self.ids.device.type != "cuda":
            return
        try:
            began, held = time.monotonic(), optimizer.rates.clone()
            optimizer.rates.zero_()  # nothing is learnt while this warms up
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            say(f"warm after {time.monotonic() - began:.0f} s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            self.run = graph.replay
            optimizer.rates.copy_(held)
            say(f"captured after {time.monotonic() - began:.0f} s")
        except Exception as wrong:  # slower, and as good
            say(f"not captured: {str(wrong)[:400]}")
            torch.cuda.synchronize()

    def __call__(self) -> None:
        ids, weights = self.data.batch(*self.stage)
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.run()


@torch.no_grad()
def tested(p: dict[str, Tensor], data: Data, length: int, rows: int) -> dict[str, Any]:
    """Held-out text by position, tasks never seen, and drafts: nats, and shares of tokens that are foreseen."""
    found: dict[str, Any] = {}
    size = length + AHEAD
    text = (
        torch.stack([data.held[i * size : (i + 1) * size] for i in range(min(rows, len(data.held) // size))]).long()
        & 0xFFFF
    )
    tasks = data.tasks[min(length, 8192)][-rows:].long() & 0xFFFF
    for name, ids in (("text", text), ("tasks", tasks)):
        nats, right, drafts = [], [], []
        for one in ids.split(2):
            span = one.shape[1] - AHEAD
            h, _ = model.hidden(one[:, :span], p, DTYPE)
            logits = model.linear(h, p["lm_head.weight"])
            wanted = one[:, 1 : span + 1]
            nats.append(model.losses(h.flatten(0, 1), p["lm_head.weight"], wanted.flatten()).view(wanted.shape))
            right.append(logits.argmax(-1) == wanted)
            h1, _ = model.draft(h, one[:, 1 : span + 1], p)
            h2, _ = model.draft(h1, one[:, 2 : span + 2], p)
            target = logits.argmax(-1)
            first = model.linear(h1, p["lm_head.weight"]).argmax(-1)[:, :-2] == target[:, 1:-1]
            second = model.linear(h2, p["lm_head.weight"]).argmax(-1)[:, :-2] == target[:, 2:]
            drafts.append(torch.stack([first.float().mean(), (first & second).float().mean()]))
        loss, hit = torch.cat(nats), torch.cat(right)
        found[f"{name}_nats"] = round(float(loss.mean()), 4)
        found[f"{name}_drafts"] = [round(float(v), 4) for v in torch.stack(drafts).mean(0)]
        if name == "text":
            edges = [0, 64, 256, 1024, 2048, 4096, length]
            found["nats_by_position"] = {
                f"{a}-{b}": round(float(loss[:, a:b].mean()), 3)
                for a, b in itertools.pairwise(edges)
                if b <= length and a < b
            }
        else:
            wanted = data.answers[min(length, 8192)][-rows:, 1 : hit.shape[1] + 1].bool()
            found["answers_right"] = round(float(hit[wanted].float().mean()), 4)
            spans = list(answers(wanted.cpu().numpy(), hit.cpu().numpy()))
            for low, high in ((0, 2048), (2048, 4096), (4096, 16384)):
                own = [whole for at, whole in spans if low <= at < high]
                if own:
                    found[f"whole_answers_{low}"] = [sum(own), len(own)]
    return found


def answers(wanted: np.ndarray, hit: np.ndarray) -> Iterator[tuple[int, bool]]:
    """Where each answer begins, and whether all of it was foreseen."""
    for row, right in zip(wanted, hit, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            yield int(begin), bool(right[begin:end].all())


def saved(p: dict[str, Tensor], out: Path) -> None:
    save_file(dict(sorted(model.exported(p).items())), out / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model.PIN / "config.json", out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=440, help="of training, compiling included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="sequences of 2,048 tokens in a step; 32 take 50 GB")
    arguments = parser.parse_args()
    began = time.monotonic()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    log = (out / "log.jsonl").open("w")

    def say(told: Any) -> None:
        print(json.dumps({"at": round(time.monotonic() - began, 1), "told": told}), file=log, flush=True)
        print(round(time.monotonic() - began, 1), told, flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.cache_size_limit = 64
    data = Data(arguments.data, device, arguments.seed)
    p = model.started(arguments.seed, device)
    optimizer = Optimizer(p)
    say(f"{sum(value.numel() for value in p.values()):,} parameters, {len(data.text):,} tokens of text")
    stage, step, count, seen = -1, None, 0, 0
    while (progress := (time.monotonic() - began) / arguments.seconds) < 1:
        now = int(progress >= LONG_FROM)
        if now != stage:
            step, (length, full, tasks) = None, STAGES[now]
            shape = (length, full * arguments.batch // 32, tasks * arguments.batch // 32)
            if device == "cuda":
                torch.cuda.empty_cache()
            stage, step = now, Step(p, optimizer, data, shape, say)
            if now:
                saved(p, out)
        assert step is not None
        optimizer.rates.copy_(torch.tensor(rates(progress, count)))
        step()
        count += 1
        seen += shape[0] * shape[1]
        if count % 10 == 0 or device == "cpu":
            told = [round(float(value), 4) for value in step.told]  # waits for the GPU
            if count % 100 == 0 or device == "cpu":
                say(
                    {
                        "step": count,
                        "tokens": seen,
                        "nats": told[:3],
                        "balance": told[3],
                        "rate": rates(progress, count)[0],
                    }
                )
            if not all(value == value for value in told):
                raise SystemExit("the loss is no number any more")
            if progress > 0.3 and told[0] > 5:
                raise SystemExit("nothing is learnt")
    step = None
    saved(p, out)
    say({"steps": count, "tokens": seen})
    say(tested(p, data, 8192 if device == "cuda" else 512, 24 if device == "cuda" else 2))
    if device == "cuda":
        say(tested(p, data, 2048, 32))


if __name__ == "__main__":
    main()

"""Qwen3.5-MoE as a training step wants it: every expert is computed and most are multiplied by nothing, one sequence
after another, no cache. The same numbers as transformers' Qwen3_5MoeForCausalLM (`python model.py` compares them).

Gated delta rule: Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv 2412.06464), in chunks by the WY form of Yang et
al., Parallelizing Linear Transformers with the Delta Rule (arXiv 2406.06484).
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK, BASE = 64, 8
BODY = "model.language_model."
PIN = Path(__file__).resolve().parents[2] / "pins/models/trained-tiny"
CONFIG: dict[str, Any] = json.loads((PIN / "config.json").read_text())
HIDDEN, WORDS = CONFIG["hidden_size"], CONFIG["vocab_size"]
EXPERTS, TOP, WIDE = (CONFIG[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
HEADS, KV_HEADS, HEAD = (CONFIG[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
ROTARY = int(HEAD * CONFIG["partial_rotary_factor"])
KEYS, VALUES, STATE = (CONFIG[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim"))
CHANNELS = (2 * KEYS + VALUES) * STATE
COMPILE = not os.environ.get("EAGER")


def compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False) if COMPILE else function


def shapes() -> dict[str, tuple[int, ...]]:
    """Of all parameters; experts of a layer lie in one tensor."""
    found: dict[str, tuple[int, ...]] = {
        f"{BODY}embed_tokens.weight": (WORDS, HIDDEN),
        f"{BODY}norm.weight": (HIDDEN,),
        "lm_head.weight": (WORDS, HIDDEN),
    }
    for i, kind in enumerate(CONFIG["layer_types"]):
        found |= {f"{BODY}layers.{i}.{name}": shape for name, shape in layer_shapes(kind).items()}
    found |= {f"mtp.layers.0.{name}": shape for name, shape in layer_shapes("full_attention").items()}
    norms = {f"mtp.{name}.weight": (HIDDEN,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return found | norms | {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)}


def layer_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "mlp.shared_expert_gate.weight": (1, HIDDEN),
        "mlp.experts.gate_proj.weight": (EXPERTS, WIDE, HIDDEN),
        "mlp.experts.up_proj.weight": (EXPERTS, WIDE, HIDDEN),
        "mlp.experts.down_proj.weight": (EXPERTS, HIDDEN, WIDE),
        "mlp.shared_expert.gate_proj.weight": (WIDE, HIDDEN),
        "mlp.shared_expert.up_proj.weight": (WIDE, HIDDEN),
        "mlp.shared_expert.down_proj.weight": (HIDDEN, WIDE),
    }
    if kind == "full_attention":
        return found | {
            "self_attn.q_proj.weight": (2 * HEADS * HEAD, HIDDEN),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            "self_attn.q_norm.weight": (HEAD,),
            "self_attn.k_norm.weight": (HEAD,),
        }
    return found | {
        "linear_attn.in_proj_qkv.weight": (CHANNELS, HIDDEN),
        "linear_attn.in_proj_z.weight": (VALUES * STATE, HIDDEN),
        "linear_attn.in_proj_a.weight": (VALUES, HIDDEN),
        "linear_attn.in_proj_b.weight": (VALUES, HIDDEN),
        "linear_attn.out_proj.weight": (HIDDEN, VALUES * STATE),
        "linear_attn.conv1d.weight": (CHANNELS, 1, 4),
        "linear_attn.A_log": (VALUES,),
        "linear_attn.dt_bias": (VALUES,),
        "linear_attn.norm.weight": (STATE,),
    }


def started(seed: int, device: str) -> dict[str, Tensor]:
    """Parameters in float32."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes().items():
        if name.endswith("A_log"):
            value = torch.log(torch.linspace(1, 16, VALUES))
        elif name.endswith("dt_bias"):  # softplus of it from 0.001 to 0.1, as Mamba has it
            step = torch.exp(torch.linspace(-6.9, -2.3, VALUES))
            value = step + torch.log(-torch.expm1(-step))
        elif name.endswith("linear_attn.norm.weight"):
            value = torch.ones(shape)
        elif len(shape) == 1:
            value = torch.zeros(shape)
        elif "conv1d" in name:
            value = (torch.rand(shape, generator=generator) * 2 - 1) / 2
        else:
            spread = 1.0 if "embed" in name else 0.5 * shape[-1] ** -0.5
            value = torch.randn(shape, generator=generator) * spread
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                value *= 0.3
        found[name] = value.to(device).requires_grad_()
    return found


def norm(x: Tensor, weight: Tensor) -> Tensor:
    full = x.float()
    return (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + weight)).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.to(x.dtype).t()


@compiled
def experts(
    x: Tensor,
    weight: Tensor,
    router: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    shared_gate: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
) -> tuple[Tensor, Tensor]:
    """x [T, 256] -> x + MoE(norm(x)) and the load balancing loss of Switch Transformers (arXiv 2101.03961)."""
    h = norm(x, weight)
    chances = torch.softmax(linear(h, router).float(), -1)
    taken = chances >= torch.topk(chances, TOP, dim=-1).values[:, -1:]
    shares = chances * taken
    shares = shares / shares.sum(-1, keepdim=True)
    wide = F.silu(linear(h, gate.reshape(-1, HIDDEN))) * linear(h, up.reshape(-1, HIDDEN))
    wide = (wide.view(-1, EXPERTS, WIDE) * shares.to(x.dtype)[..., None]).view(-1, EXPERTS * WIDE)
    out = wide @ down.permute(0, 2, 1).reshape(-1, HIDDEN).to(x.dtype)
    shared = linear(F.silu(linear(h, a)) * linear(h, b), c)
    balance = EXPERTS * (taken.float().mean(0) / TOP * chances.mean(0)).sum()
    return x + out + torch.sigmoid(linear(h, shared_gate)) * shared, balance


class Inverse(torch.autograd.Function):
    """(1 + a)^-1 of strictly lower triangular a [..., 64, 64]: blocks of 8 by a product, then joined two by two.

    Powers of the whole of `a` would overflow float32's precision where keys are alike.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        count = CHUNK // BASE
        blocks = a.reshape(-1, count, BASE, count, BASE)
        d = torch.stack([blocks[:, i, :, i] for i in range(count)], 1)
        x = torch.eye(BASE, device=a.device, dtype=a.dtype) - d
        for _ in range(2):
            d = small(d, d)
            x = x + small(x, d)
        size = BASE
        while size < CHUNK:
            count = CHUNK // (2 * size)
            blocks = a.reshape(-1, count, 2, size, count, 2, size)
            low = torch.stack([blocks[:, i, 1, :, i, 0] for i in range(count)], 1)
            x = x.reshape(-1, count, 2, size, size)
            first, second = x[:, :, 0], x[:, :, 1]
            corner = -(second @ low @ first)
            x = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([corner, second], -1)], -2)
            size *= 2
        x = x.reshape(a.shape)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        back = x.transpose(-1, -2)
        return -(back @ grad @ back).tril(-1)


def small(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in full float32."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


@compiled
def before_state(
    x: Tensor, weight: Tensor, qkv: Tensor, conv: Tensor, z: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    """x [B, L, 256] -> q, k, v [B * heads, chunks, 64, 128] in float32, log decay, beta [.., 64], gate [B, L, 512]."""
    batch, length, _ = x.shape
    h = norm(x, weight)
    mixed = F.pad(linear(h, qkv), (0, 0, 3, 0))
    taps = conv.to(x.dtype)
    mixed = F.silu(sum(mixed[:, i : i + length] * taps[:, 0, i] for i in range(4)))
    q, k, v = (
        part.unflatten(-1, (-1, STATE)).float()
        for part in mixed.split((KEYS * STATE, KEYS * STATE, VALUES * STATE), -1)
    )
    q, k = (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(VALUES // KEYS, 2) for part in (q * STATE**-0.5, k))
    decay = -rate.exp() * F.softplus(linear(h, a).float() + bias)
    beta = torch.sigmoid(linear(h, b).float())
    q, k, v = (part.transpose(1, 2).reshape(batch * VALUES, -1, CHUNK, STATE) for part in (q, k, v))
    decay, beta = (part.transpose(1, 2).reshape(batch * VALUES, -1, CHUNK) for part in (decay, beta))
    return q, k, v, decay, beta, linear(h, z)


@compiled
def in_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """What is known of each chunk before the state that it begins with: S' = keep * S - m @ S + n, and the output is
    inner + outer @ S."""
    total = decay.cumsum(-1)
    far = (
        (total.unsqueeze(-1) - total.unsqueeze(-2))
        .masked_fill(torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        .exp()
    )
    scaled = k * beta.unsqueeze(-1)
    inverse = Inverse.apply(((scaled @ k.transpose(-1, -2)) * far).tril(-1))
    u = inverse @ (v * beta.unsqueeze(-1))
    w = inverse @ (scaled * total.exp().unsqueeze(-1))
    inner = (q @ k.transpose(-1, -2)) * far
    end = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    outer = q * total.exp().unsqueeze(-1) - inner @ w
    return end @ w, end @ u, total[..., -1].exp(), inner @ u, outer


class Scan(torch.autograd.Function):
    """States [N, chunks, 128, 128] at the beginning of each chunk, the first one 0."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, n: Tensor, keep: Tensor) -> Tensor:
        states = torch.empty_like(n)
        states[:, 0].zero_()
        for i in range(n.shape[1] - 1):
            held = torch.addcmul(n[:, i], states[:, i], keep[:, i, None, None])
            states[:, i + 1].copy_(torch.baddbmm(held, m[:, i], states[:, i], alpha=-1))
        ctx.save_for_backward(m, keep, states)
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, keep, states = ctx.saved_tensors
        last = grad.shape[1] - 1
        every = torch.empty_like(grad)  # of the state behind each chunk
        every[:, last].zero_()
        for i in range(last, 0, -1):
            held = torch.addcmul(grad[:, i], every[:, i], keep[:, i, None, None])
            every[:, i - 1].copy_(torch.baddbmm(held, m[:, i].transpose(-1, -2), every[:, i], alpha=-1))
        return -(every @ states.transpose(-1, -2)), every, (every * states).sum((-1, -2))


@compiled
def after_state(
    x: Tensor, inner: Tensor, outer: Tensor, states: Tensor, gate: Tensor, weight: Tensor, out: Tensor
) -> Tensor:
    batch, length, _ = x.shape
    read = (inner + outer @ states).reshape(batch, VALUES, length, STATE).transpose(1, 2)
    read = (
        read
        * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + 1e-6)
        * weight
        * F.silu(gate.unflatten(-1, (-1, STATE)).float())
    )
    return x + linear(read.to(x.dtype).flatten(2), out)


def linear_attention(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    names = ("in_proj_qkv.weight", "conv1d.weight", "in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight")
    own = [p[f"linear_attn.{name}"] for name in (*names, "A_log", "dt_bias")]
    q, k, v, decay, beta, gate = before_state(x, p["input_layernorm.weight"], *own)
    m, n, keep, inner, outer = in_chunks(q, k, v, decay, beta)
    return after_state(
        x, inner, outer, Scan.apply(m, n, keep), gate, p["linear_attn.norm.weight"], p["linear_attn.out_proj.weight"]
    )


@functools.cache
def angles(length: int, device: str) -> tuple[Tensor, Tensor]:
    rates = 1 / CONFIG["rope_parameters"]["rope_theta"] ** (torch.arange(0, ROTARY, 2, device=device).float() / ROTARY)
    turned = torch.outer(torch.arange(length, device=device).float(), rates)
    turned = torch.cat([turned, turned], -1)
    return turned.cos(), turned.sin()


@compiled
def before_attention(
    x: Tensor, weight: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, nq: Tensor, nk: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    h = norm(x, weight)
    q, gate = linear(h, wq).unflatten(-1, (HEADS, 2 * HEAD)).chunk(2, -1)
    k, v = (linear(h, one).unflatten(-1, (KV_HEADS, HEAD)) for one in (wk, wv))

    def turned(part: Tensor) -> Tensor:
        first, rest = part[..., :ROTARY].float(), part[..., ROTARY:]
        low, high = first.chunk(2, -1)
        first = first * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]
        return torch.cat([first.to(part.dtype), rest], -1).transpose(1, 2)

    return turned(norm(q, nq)), turned(norm(k, nk)), v.transpose(1, 2), gate.flatten(2)


@compiled
def after_attention(x: Tensor, read: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    return x + linear(read.transpose(1, 2).flatten(2) * torch.sigmoid(gate), out)


def full_attention(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    own = [p[f"self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")]
    q, k, v, gate = before_attention(x, p["input_layernorm.weight"], *own, *angles(x.shape[1], str(x.device)))
    read = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return after_attention(x, read, gate, p["self_attn.o_proj.weight"])


def layer(x: Tensor, parameters: dict[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    p = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
    x = full_attention(x, p) if "self_attn.q_proj.weight" in p else linear_attention(x, p)
    names = (
        "post_attention_layernorm",
        "gate",
        "experts.gate_proj",
        "experts.up_proj",
        "experts.down_proj",
        "shared_expert_gate",
        *(f"shared_expert.{part}_proj" for part in ("gate", "up", "down")),
    )
    out, balance = experts(
        x.flatten(0, 1), *(p[f"{'' if name.startswith('post') else 'mlp.'}{name}.weight"] for name in names)
    )
    return out.view(x.shape), balance


def hidden(ids: Tensor, p: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ids [B, L], L a multiple of 64 -> what the LM head and MTP read [B, L, 256], and the sum of balances."""
    x = p[f"{BODY}embed_tokens.weight"].to(dtype)[ids]
    balance = x.new_zeros((), dtype=torch.float32)
    for i in range(len(CONFIG["layer_types"])):
        x, own = layer(x, p, f"{BODY}layers.{i}.")
        balance = balance + own
    return norm(x, p[f"{BODY}norm.weight"]), balance


@compiled
def joined(h: Tensor, following: Tensor, a: Tensor, b: Tensor, fc: Tensor) -> Tensor:
    return linear(torch.cat([norm(following, a), norm(h, b)], -1), fc)


def draft(h: Tensor, following: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The MTP layer: h [B, L, 256] of each token, and the token after it [B, L] -> the same of the token after that."""
    seen = p[f"{BODY}embed_tokens.weight"].to(h.dtype)[following]
    x = joined(h, seen, p["mtp.pre_fc_norm_embedding.weight"], p["mtp.pre_fc_norm_hidden.weight"], p["mtp.fc.weight"])
    x, balance = layer(x, p, "mtp.layers.0.")
    return norm(x, p["mtp.norm.weight"]), balance


@compiled
def losses(h: Tensor, head: Tensor, wanted: Tensor) -> Tensor:
    """[T, 256], [T] -> nats [T]."""
    return F.cross_entropy(linear(h, head).float(), wanted, reduction="none")


def exported(p: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they are published: experts one by one, BF16 but for what Qwen keeps in F32."""
    found = {}
    for name, value in p.items():
        value = value.detach().cpu()
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            for e in range(EXPERTS):
                found[f"{before}.experts.{e}.{after}"] = value[e].to(torch.bfloat16).contiguous()
        else:
            full = name.endswith(("A_log", "linear_attn.norm.weight"))
            found[name] = value.float() if full else value.to(torch.bfloat16).contiguous()
    return found


def compare() -> None:
    """Against transformers in float32, on a CPU."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    theirs = (
        Qwen3_5MoeForCausalLM(
            Qwen3_5MoeTextConfig(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "dtype")})
        )
        .float()
        .eval()
    )
    p = started(1, "cpu")
    with torch.no_grad():
        for value in p.values():
            if len(value.shape) == 1:
                value += torch.randn(value.shape) * 0.1
    state = {}
    for name, value in p.items():
        if name.startswith("mtp."):
            continue
        name = name.replace(BODY, "model.")
        if ".experts." in name:
            if "gate_proj" in name:
                up = p[name.replace("model.", BODY, 1).replace("gate_proj", "up_proj")]
                state[name.replace("gate_proj.weight", "gate_up_proj")] = torch.cat([value, up], 1)
            elif "down" in name:
                state[name.removesuffix(".weight")] = value
        else:
            state[name] = value
    theirs.load_state_dict(state)
    ids = torch.randint(0, 4096, (2, 256))
    ids[:, 128:192] = 7  # keys that are all alike
    h, _ = hidden(ids, p, torch.float32)
    ours = linear(h, p["lm_head.weight"])
    seen = theirs(ids).logits
    print("logits", float(seen.abs().mean()), "largest difference", float((ours - seen).abs().max()))
    wanted = torch.randint(0, 4096, (2, 256))
    own = torch.autograd.grad(
        losses(h.flatten(0, 1), p["lm_head.weight"], wanted.flatten()).mean(),
        [value for name, value in p.items() if not name.startswith("mtp.")],
    )
    F.cross_entropy(seen.flatten(0, 1), wanted.flatten()).backward()
    for (name, _), mine in zip(((n, v) for n, v in p.items() if not n.startswith("mtp.")), own, strict=True):
        if ".experts." in name:
            continue
        grad = theirs.get_parameter(name.replace(BODY, "model.")).grad
        far = float((mine - grad).norm() / (grad.norm() + 1e-12))
        if far > 1e-3:
            print("gradient", name, far)


if __name__ == "__main__":
    compare()

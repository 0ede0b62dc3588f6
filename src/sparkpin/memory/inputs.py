"""What a plan is made of: a recipe's flags, its model's config and headers, and the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin.checkpoint import plan as checkpoints
from sparkpin.checkpoint import shapes
from sparkpin.checkpoint.repository import CONFIG, header_of, read_json
from sparkpin.checkpoint.steps import checkpoint_steps, used_repositories
from sparkpin.core.names import MACHINES
from sparkpin.core.paths import Paths
from sparkpin.fetch import model
from sparkpin.host import machine as host
from sparkpin.memory.decode import SHORT, DecodeModel, Speed
from sparkpin.memory.geometry import read_geometry, text_of
from sparkpin.memory.plan import SPARK_BANDWIDTH, SPARK_FREE, SPARK_TOTAL, Machine, MemoryPlan, make_plan
from sparkpin.memory.settings import Platform, read_settings
from sparkpin.memory.weights import DRAFTER, alike, weigh
from sparkpin.pins import manifests, schema, vllm_command, vllm_flags
from sparkpin.pins import nodes as placement

SPARK = "linux/arm64"


@dataclass(frozen=True, slots=True)
class PlanInputs(DecodeModel):
    """What headers, config and flags say of a recipe. notes: where it is not from headers."""

    notes: tuple[str, ...] = ()

    def plan(self, machine: Machine) -> MemoryPlan:
        """Of a recipe for several machines that of each: `needed` and `left` are bytes of one."""
        return replace(make_plan(self.geometry, self.settings, self.weights, machine), notes=self.notes)


def read_inputs(
    paths: Paths, recipe: schema.Recipe, stack: schema.Stack, chain: tuple[schema.Stage, ...], nodes: int | None = None
) -> PlanInputs:
    """The headers come from the model's lock, as for a checkpoint; nothing else is fetched, and no image is needed.

    Of a model that has no lock they come from pins/shapes, if those know it. nodes: as if it were for so many machines.
    """
    pin = manifests.model_of(paths.project, recipe)
    steps = checkpoint_steps(chain, pin)
    used = used_repositories(pin, steps)
    ahead = shapes.shapes_of(paths.project, pin, used) if manifests.unlocked(paths.project, pin) else None
    listings = {name: one.listing(name) for name, one in (ahead or {}).items()}
    if not ahead:
        listings = model.listings(paths, pin, manifests.load_model_lock(paths.project, pin), only=used)
    planned = checkpoints.make_plan(listings, pin, steps)
    platform: Platform = "cuda" if stack.platform == SPARK else "cpu"
    argv, env = vllm_command.serve_argv(recipe, stack, chain)
    if nodes is not None:
        words = vllm_flags.drop_flags(argv, placement.TENSOR, placement.PIPELINE, placement.NODES)
        argv, env = placement.spread(words, env, nodes, gpu=platform == "cuda")
    flags = vllm_flags.Flags(argv, recipe.file, vllm_command.origins(recipe, stack, chain))
    config = merged(planned.config, flags.json("--hf-overrides"))
    geometry, drafter = read_geometry(config, f"{listings[pin.base].origin}: config.json"), None
    places = checkpoints.final_tensors(planned, listings)
    tensors = [place.info for place in places if place.info.name not in planned.unlisted]
    if draft := listings.get(schema.DRAFTER):
        drafter = read_geometry(read_json(draft, CONFIG), f"{draft.origin}: config.json", drafter=True)
        infos = (info for file in draft.headers for info in header_of(draft, file).tensors.values())
        tensors += [info._replace(name=f"{DRAFTER}/{info.name}") for info in infos]
    mods = {mod for part in chain for mod in part.mods}
    settings = read_settings(flags, env, platform, geometry, wide_state=has_wide_state(), drafter=drafter, mods=mods)
    symmetric = (config.get("quantization_config") or {}).get("sym") is True
    weights = weigh(alike(tensors, geometry.layers), geometry, settings, symmetric=symmetric)
    shares_head = settings.drafter is not None and not any(one.name.endswith("/lm_head.weight") for one in tensors)
    notes = (*yarn_notes(config), *(shapes.notes(pin, ahead) if ahead else ()))
    return PlanInputs(geometry, settings, weights, shares_head, notes)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with others in the place of its values, where both are mappings key by key."""
    both = [key for key, new in changes.items() if isinstance(new, dict) and isinstance(base.get(key), dict)]
    return {**base, **changes, **{key: merged(base[key], changes[key]) for key in both}}


def yarn_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """vLLM counts no factor of YaRN, as the config's positions are meant to hold it."""
    rope = text_of(config).get("rope_parameters") or {}
    base, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    # vLLM refuses a config that lacks one.
    if rope.get("rope_type") == "yarn" and isinstance(base, int) and isinstance(factor, int | float):
        yield f"YaRN: {base * factor:,.0f} positions; it changes short prompts (docs/memory.md#a-million-tokens)"


def has_wide_state(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has AVX512-BF16, which changes the type of the GDN state (see `read_settings`)."""
    return "avx512_bf16" in host.text(cpuinfo)


def speed_of(
    paths: Paths, recipe: schema.Recipe, stage: str, inputs: PlanInputs, lengths: Iterable[int], bandwidth: float | None
) -> Speed:
    """What a recipe's decode can reach with so many tokens in the cache, and what others have published of that stage
    on as many Sparks as the recipe has nodes."""
    published, settings = manifests.load_published(paths.project), inputs.settings
    drafter = manifests.model_of(paths.project, recipe).drafter
    of_mtp = published.accepted if settings.draft_layers else None
    accepted = drafter.drafts.accepted if drafter and drafter.drafts else of_mtp
    on_sparks = settings.ranks == recipe.nodes and bandwidth == SPARK_BANDWIDTH
    figures = [one for one in published.speeds if on_sparks and (one.recipe, one.stage) == (recipe.name, stage)]
    steps = {length: inputs.step(length) for length in (SHORT, *lengths) if length >= SHORT}
    return Speed(steps, bandwidth, accepted, figures)


def machine_for(stack: schema.Stack) -> Machine:
    """This machine if the stack is for it, else a Spark."""
    here = host.read_host()
    if stack.platform == SPARK and here.arch != MACHINES[SPARK]:
        return Machine(SPARK_TOTAL, SPARK_FREE, "an idle DGX Spark", "estimate")
    return Machine(here.memory_total, here.memory_available, "this machine", "measured")

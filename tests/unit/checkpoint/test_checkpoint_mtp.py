"""The MTP layer: listed, unlisted, absent; and what makes one that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import EXTRA, MTP, Sample, base_config, data_of, read_tensors

from sparkpin.checkpoint.plan import donor_tensors
from sparkpin.checkpoint.steps import used_repositories
from sparkpin.core.errors import CheckpointError

STEPS = ("copy", "mtp")
DONOR = "model-00001-of-00002.safetensors"
NEW = "mtp.safetensors"
INDEX = "model.safetensors.index.json"
GATE = "mtp.layers.0.mlp.shared_expert.gate_proj"


class Pair(Sample):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.step = self.pin_changes["mtp"] = {"file": EXTRA, "tensors": ["mtp.*"]}

    def from_donor(self, *, quantised: bool = False) -> None:
        """The base has no MTP tensors, the donor has."""
        del self.base[EXTRA]
        self.unlisted = ()
        self.fp8[DONOR] |= dict.fromkeys(MTP, ("BF16", (2, 3)))
        if quantised:
            self.fp8[DONOR] |= {f"{GATE}.weight": ("F8_E4M3", (2, 3)), f"{GATE}.weight_scale_inv": ("BF16", (1, 1))}
        self.step |= {"file": NEW, "source": "fp8"}


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def index_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return value


@pytest.mark.parametrize("unlisted", [(EXTRA,), ()])
def test_listed_or_not_the_index_lists_them(pair: Pair, unlisted: tuple[str, ...]) -> None:
    pair.unlisted = unlisted
    made = pair.build(STEPS)
    assert {name for name, file in index_of(made)["weight_map"].items() if file == EXTRA} == set(MTP)
    assert (made / EXTRA).samefile(pair.root / "int4" / EXTRA)
    plan = pair.plan(STEPS)
    assert (plan.shards, [text.path for text in plan.texts]) == ((), [INDEX] if unlisted else [])


def test_absent_in_the_base_they_come_from_the_source(pair: Pair) -> None:
    pair.from_donor()
    before = read_tensors(pair.folders()["int4"])
    made = pair.build(STEPS)
    after = read_tensors(made)
    for name in MTP:
        assert after.pop(name) == (NEW, "BF16", (2, 3), data_of("fp8", name, ("BF16", (2, 3))))
    assert after == before
    index = index_of(made)
    assert {name for name, file in index["weight_map"].items() if file == NEW} == set(MTP)
    assert index["metadata"]["total_size"] == sum(len(tensor[3]) for tensor in read_tensors(made).values())
    assert json.loads((made / "config.json").read_text()) == base_config(), "nothing of it is quantised"


def test_a_quantised_mtp_layer_of_the_source_is_told_to_the_mod(pair: Pair) -> None:
    pair.from_donor(quantised=True)
    made = pair.build(("copy", "hybrid", "mtp"))
    extra = json.loads((made / "config.json").read_text())["quantization_config"]["extra_config"]
    assert extra[GATE] == {"bits": 8, "group_size": [4, 4], "sym": True, "data_type": "fp"}
    assert f"{GATE}.weight_scale_inv" in index_of(made)["weight_map"]


def test_the_source_is_read_only_when_the_step_is_made(pair: Pair) -> None:
    pair.from_donor()
    assert used_repositories(pair.pin, ("copy",)) == {"int4": "copy"}
    assert used_repositories(pair.pin, STEPS) == {"int4": "copy", "fp8": "mtp"}
    assert [source.info.name for source in donor_tensors(pair.plan(STEPS))["fp8"]] == sorted(MTP)


def without(*names: str) -> Callable[[Pair], None]:
    def change(pair: Pair) -> None:
        for name in names:
            del pair.fp8[DONOR][name]

    return change


def part(name: str, dtype: str, *shape: int) -> Callable[[Pair], None]:
    return lambda pair: pair.fp8[DONOR].update({f"{GATE}.{name}": (dtype, shape)})


@pytest.mark.parametrize(
    ("quantised", "change", "where"),
    [
        (False, without(*MTP), r"'mtp\.\*'"),
        (False, lambda pair: pair.step.update(file=DONOR), DONOR),
        (True, lambda pair: pair.configs["fp8"].clear(), "quantization_config"),
        (True, lambda pair: pair.configs["fp8"]["quantization_config"].update(weight_block_size=[4, 0]), "block_size"),
        (True, part("weight_scale_inv", "BF16", 2, 1), rf"{GATE}\.weight_scale_inv: .* \[2, 1\]"),
        (True, part("weight", "BF16", 2, 3), rf"{GATE}\.weight: .*BF16"),
        (True, without(f"{GATE}.weight"), rf"{GATE}\.weight"),
    ],
)
def test_a_source_that_cannot_give_the_layer(
    pair: Pair, quantised: bool, change: Callable[[Pair], object], where: str
) -> None:
    pair.from_donor(quantised=quantised)
    change(pair)
    with pytest.raises(CheckpointError, match=where):
        pair.plan(STEPS)


def test_a_layer_of_the_base_stays_and_half_a_one_is_not_mended_in_silence(pair: Pair) -> None:
    pair.step |= {"source": "fp8"}
    pair.fp8[DONOR] |= dict.fromkeys(MTP, ("BF16", (2, 3)))
    assert donor_tensors(pair.plan(STEPS))["fp8"] == [], "what the base has is not taken from the source"
    del pair.base[EXTRA][MTP[-1]]
    with pytest.raises(CheckpointError, match=rf"the MTP layer lacks {MTP[-1].removesuffix('.weight')};"):
        pair.plan(STEPS)


def experts(pair: Pair, form: str, count: int = 4) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All experts of the MTP layer in a form, into the base's file; the config counts them."""
    pair.configs["int4"]["text_config"]["num_experts"] = count
    prefix = "mtp.layers.0.mlp.experts"
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "plain": {"weight": ("BF16", (2, 3))},
        "fp8": {"weight": ("F8_E4M3", (2, 3)), "weight_scale_inv": ("BF16", (1, 1))},
        "int4": {"qweight": ("I32", (1, 2)), "qzeros": ("I32", (1, 1)), "scales": ("F16", (1, 2))},
    }[form]
    matrices = [f"{prefix}.{n}.{m}_proj" for n in range(count) for m in ("gate", "up", "down")]
    made = {f"{matrix}.{part}": spec for matrix in matrices for part, spec in parts.items()}
    pair.base[EXTRA] |= made
    return made


@pytest.mark.parametrize("form", ["plain", "fp8", "int4"])
def test_experts_are_counted_against_the_config_in_each_form(pair: Pair, form: str) -> None:
    made = experts(pair, form)
    assert len(pair.plan(STEPS).unlisted) == 0
    needed = [name for name in made if not name.endswith(".qzeros")]
    for name in needed[:2] + needed[-1:]:
        spec = pair.base[EXTRA].pop(name)
        with pytest.raises(CheckpointError, match=r"the MTP layer lacks mtp\.layers\.0\.mlp\.experts"):
            pair.plan(STEPS)
        pair.base[EXTRA][name] = spec
    pair.configs["int4"]["text_config"]["num_experts"] = 5
    with pytest.raises(CheckpointError, match=r"experts\.4\.gate_proj, .*experts\.4\.up_proj"):
        pair.plan(STEPS)


def test_experts_in_one_tensor_each_matrix_are_not_counted_one_by_one(pair: Pair) -> None:
    pair.configs["int4"]["text_config"]["num_experts"] = 4
    prefix = "mtp.layers.0.mlp.experts"
    pair.base[EXTRA] |= {f"{prefix}.gate_up_proj": ("BF16", (4, 3, 4)), f"{prefix}.down_proj": ("BF16", (4, 2, 3))}
    assert len(pair.plan(STEPS).unlisted) == 0
    del pair.base[EXTRA][f"{prefix}.down_proj"]
    with pytest.raises(CheckpointError, match=r"the MTP layer lacks mtp\.layers\.0\.mlp\.experts\.down_proj;"):
        pair.plan(STEPS)

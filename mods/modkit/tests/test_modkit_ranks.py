"""What the ranks of a server tell each other, between two real processes over vLLM's own group."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sparkpin_modkit import ModError, ranks, reports
from sparkpin_modkit.testing import on_ranks, vllm_rank

AS_IT_SHOULD_BE = {"SPARKPIN_RELEASE": "5f0c", "SPARKPIN_MOD_INT8_LM_HEAD": "1", "VLLM_HOST_IP": "10.0.0.{rank}"}
DIFFERENT = {
    "same": {},
    "release": {"SPARKPIN_RELEASE": "77aa"},
    "switch": {"SPARKPIN_MOD_INT8_LM_HEAD": "0"},
    "another switch": {"SPARKPIN_MOD_TURBOQUANT": "1"},
}
"""Name of a trial -> what rank 1 has in its environment."""


def own_mod(folder: Path, text: str) -> Any:
    """A function of a package with this text, as a mod's `install` is."""
    package = folder / "sparkpin_sample"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(f"def install(): {text}\n")
    sys.path.insert(0, str(folder))
    import sparkpin_sample

    sys.path.remove(str(folder))
    return sparkpin_sample.install


def said(action: Any) -> str:
    try:
        action()
    except (ModError, SystemExit) as error:
        return f"{type(error).__name__} {error}: {error.__cause__}"
    return "agreed"


def tell(rank: int, size: int, meeting: str) -> dict[str, str]:
    """Every trial, one after the other, in one world; what comes of each here."""
    from vllm.distributed.parallel_state import get_world_group
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    found: dict[str, str] = {}
    model, folder = Path(meeting).parent / f"model-{rank}", Path(meeting).parent / f"mods-{rank}"
    model.mkdir()
    (model / "sparkpin.json").write_text("the same")
    install = own_mod(folder, "pass")
    WorkerWrapperBase.init_device = lambda self: None  # what the exchange follows on; it has no part in it
    WorkerWrapperBase.initialize_from_config = lambda self, kv_cache_configs: None

    def ask(trial: str, release: str = "1.0", function: Any = install, **environment: str) -> None:
        os.environ |= {name: value.format(rank=rank) for name, value in (AS_IT_SHOULD_BE | environment).items()}
        reports._in_use.clear()
        reports.report("sample", "active", version="in use" if trial == "in use" and rank else "1.0")
        ranks.take_part("sample", release, function)
        wrapper = WorkerWrapperBase()
        wrapper.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(model)))
        found[trial] = said(wrapper.init_device)
        found[f"{trial}, loaded"] = said(lambda: wrapper.initialize_from_config([]))

    with vllm_rank(rank, size, meeting):
        for trial, environment in DIFFERENT.items():
            ask(trial, **(environment if rank else {}))
            for name in environment:
                os.environ.pop(name, None)
        ask("version", release="1.1" if rank else "1.0")
        ask("off", function=None if rank else install)
        ask("in use")
        (folder / "sparkpin_sample/__init__.py").write_text(f"def install(): return {rank}\n")
        ask("content")
        (folder / "sparkpin_sample/__init__.py").write_text("def install(): pass\n")
        (model / "sparkpin.json").write_text(str(rank))
        ask("checkpoint")
        ranks.PATIENCE = timedelta(seconds=3)
        if rank == 0:
            found["alone"] = said(lambda: ranks.agree(dict, get_world_group(), meet=True))
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return on_ranks(tell)


def test_ranks_that_have_the_same_agree(found: list[dict[str, str]]) -> None:
    assert [(one["same"], one["same, loaded"]) for one in found] == [("agreed", "agreed")] * 2


@pytest.mark.parametrize(
    ("trial", "key", "first", "second"),
    [
        ("release", "SPARKPIN_RELEASE", "5f0c", "77aa"),
        ("switch", "SPARKPIN_MOD_INT8_LM_HEAD", "1", "0"),
        ("another switch", "SPARKPIN_MOD_TURBOQUANT", "nothing", "1"),
        ("version", "sample", "1.0 ", "1.1 "),
        ("off", "sample", "1.0 ", "off"),
        ("content", "sample", "1.0 ", "1.0 "),
        ("checkpoint", "checkpoint", "", ""),
        ("in use, loaded", "sample in use", "1.0", "in use"),
    ],
)  # fmt: skip
def test_a_difference_ends_both_and_names_both(
    found: list[dict[str, str]], trial: str, key: str, first: str, second: str
) -> None:
    for one in found:
        assert (
            one[trial].startswith("SystemExit 78: ")
            and f"differ, so none serves: {key} (rank 0 (10.0.0.0): {first}" in one[trial]
        )
        assert f", rank 1 (10.0.0.1): {second}" in one[trial]
    assert found[0][trial] == found[1][trial]


def test_one_that_never_comes_is_named(found: list[dict[str, str]]) -> None:
    """Its image has no mods, or its process hangs."""
    assert "the ranks did not meet: [Rank 0]: Ranks 1 " in found[0]["alone"]


def test_a_server_of_one_process_says_nothing(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.parallel_state import get_world_group

    ranks.agree(lambda: pytest.fail("it was asked"), get_world_group(), meet=True)


def listens_at(port: int) -> list[str]:
    """Local addresses, as the kernel writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [row[1].partition(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]


def listening(rank: int, size: int, meeting: str) -> list[list[str]]:
    """Where torch's store listens: as the launcher said, and as torch does by itself."""
    import torch
    from torch import distributed

    found = []
    for place, port in (("127.0.0.5", 29511), ("", 29512)):
        store = ranks.own_store(f"{place}:{port}") if place and rank == 0 else None
        distributed.init_process_group("gloo", f"tcp://127.0.0.5:{port}", rank=rank, world_size=size)
        del store
        distributed.all_reduce(torch.ones(1))
        found.append(listens_at(port))
        distributed.destroy_process_group()
    return found


def test_torchs_store_listens_where_it_is_told() -> None:
    alone, everywhere = on_ranks(listening)[0]
    assert alone == ["0500007F"] and everywhere and set("".join(everywhere)) == {"0"}


def test_more_than_two_ranks_are_sorted_by_what_they_have() -> None:
    sides = {"rank 0": {"a": "1", "b": "x"}, "rank 1": {"a": "2", "b": "x"}, "rank 2": {"a": "1", "b": "x", "c": "y"}}
    assert ranks.differences(sides) == [
        "a (rank 0 and rank 2: 1, rank 1: 2)",
        "c (rank 0 and rank 1: nothing, rank 2: y)",
    ]

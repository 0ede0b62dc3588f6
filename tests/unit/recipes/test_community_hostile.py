"""Recipes that were once read wrongly, or that somebody wrote to harm: each is read as its runner would, or refused."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_recipe import V1, written
from huggingface_hub import constants
from places import PROJECT

from sparkpin.cli import add
from sparkpin.cli import recipe as tasks
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests
from sparkpin.recipes import check, export, recipe, render

V2 = {"model": "acme/sample", "runtime": "vllm", "command": "vllm serve {model} --port {port}", "defaults": {"port": 1}}


def found(folder: Path, value: dict[str, Any]) -> list[str]:
    read = recipe.load(Path(written(folder, value)))
    return [str(one) for one in check.foreign_findings(PROJECT, read, manifests.load_stack(PROJECT, "spark"))]


def errors(folder: Path, **change: Any) -> list[str]:
    return [line for line in found(folder, V2 | change) if line.startswith("error")]


# Placeholders and the shell.


@pytest.mark.parametrize(
    "template",
    ["{port:{w}}", "{port:99999}", "{port:.99999f}", "{port!r:{w}}", "{port:9999}" * 20, "{a[b]}", "{l:5}", "{n:c}",
     "{d:%}", "{d.__class__.__doc__}"],
)  # fmt: skip
def test_no_format_fills_the_memory(template: str) -> None:
    values = {"port": 1, "w": 2 << 30, "d": {}, "a": "x", "l": [], "n": 1 << 40}
    with pytest.raises(ManifestError):
        render.fill_v1(template, values, "f")


@pytest.mark.parametrize("defaults", [{"a": "x{a}"}, {"a": "{a}"}, {"a": "{b}", "b": "{a}"}, {"a": "{a}{a}"}])
def test_values_that_bring_themselves_back(tmp_path: Path, defaults: dict[str, Any]) -> None:
    assert errors(tmp_path, command="vllm serve {model} --seed {a}", defaults=defaults)
    assert not errors(tmp_path, command="vllm serve {model} --seed {a}", defaults={"a": "{b}", "b": "1"})


@pytest.mark.parametrize("line", ["export A+=x", "export -n A", "unset A"])
def test_an_export_that_only_bash_could_tell(tmp_path: Path, line: str) -> None:
    (told,) = errors(tmp_path, command=f"{line}\nvllm serve {{model}}", defaults={}, env={"A": "1"})
    assert line in told


@pytest.mark.parametrize(
    "command", ["export A=1", "A=1 || B=2", "false && A=1", "if x; then\n  y\nfi", "x && { A=1; }"]
)
def test_a_command_without_a_server(tmp_path: Path, command: str) -> None:
    assert errors(tmp_path, command=command, defaults={})


@pytest.mark.parametrize(
    "part",
    [",", "a..", "{", "<<a\n", "<<a ", "(", "$(", "if x\n", "' \" ", "A=\\\n", "a=", "-p ", "login ", "_", '"KEY'],
)
@pytest.mark.parametrize("start", ["vllm serve a/b {{{}", "{}\nvllm serve a/b $(x)", "A=`x`{}\nvllm serve a/b"])
def test_no_word_takes_long(tmp_path: Path, part: str, start: str) -> None:
    (tmp_path / "r.sh").write_text(start.format(part * (200_000 // len(part))))
    began = time.process_time()
    with contextlib.suppress(ManifestError):
        recipe.load(tmp_path / "r.sh")
    assert time.process_time() - began < 1


# YAML.


@pytest.mark.parametrize(
    "value",
    ["2026-13-45", '!!int "abc"', "!!float x", "!!bool x", "!!timestamp x", "9" * 5000, "0x" + "f" * 5000,
     "1:1" * 4000, "!!set {a}", "!!omap [a: 1]", "!!binary aGk=",
     '"\\0"', '"\\e[2J"', '"\\x85"', '"\\u2028"', '"\\ue000port\\ue001"'],
    ids=lambda value: value[:12],
)  # fmt: skip
@pytest.mark.parametrize("place", ["metadata: {a: %s}", "defaults: {port: %s}", "mods: [%s]", "%s: 1"])
def test_a_value_that_is_none_is_a_fault_of_its_line(tmp_path: Path, value: str, place: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"model: a/b\n{place % value}\ncommand: vllm serve a/b\n")
    with pytest.raises(ManifestError) as caught:
        recipe.load(path)
    assert caught.value.key == "line 2" and len(str(caught.value)) < 1000
    assert ("control character" in str(caught.value)) == value.startswith('"')


def test_a_comment_stays_a_comment() -> None:
    comments = ["not mapped: x\nenv:\n  LD_PRELOAD: y\r\n#", "\x00\x1b[2J\x07", "a\x85b\u2028c\u2029d\ud800", "é 日本"]
    text = recipe.text_of({"a": "b\nc\x07\x85"}, comments)
    assert yaml.safe_load(text.encode()) == {"a": "b\nc\x07\x85"}
    assert "é 日本" in text and len(text.splitlines()) == len(comments) + 1


def test_a_mod_with_a_line_end_sets_no_variable(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "x\nenv:\n  LD_PRELOAD: /tmp/x.so\n#"
    value = V1 | {"mods": [hostile], "container": hostile, hostile: 1, "build_args": [hostile]}
    add.add(paths, written(tmp_path, value), no_lock=True)
    made = yaml.safe_load((paths.project / "recipes/some-recipe.yaml").read_text())
    assert made["env"] == {"VLLM_MARLIN_USE_ATOMIC_ADD": "1", "J": '{"a": 1}'} and "LD_PRELOAD" not in str(made)
    assert "\nenv:" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["B; touch X", "A\nB", "", "1A", "A=B", "$(x)"])
def test_a_variable_whose_name_is_a_script(paths: Paths, tmp_path: Path, name: str) -> None:
    for value in (V1 | {"env": {name: "1"}}, V2 | {"env": {name: "1"}}):
        with pytest.raises(ManifestError):
            add.add(paths, written(tmp_path, value), no_lock=True)
    for form in ("v1", "v2"):
        with pytest.raises(ManifestError):
            export.export(exported({name: "1"}), form)  # type: ignore[arg-type]


# What is written for others.


def exported(env: dict[str, str] | None = None, *more: str) -> export.ExportedRecipe:
    argv = ("vllm", "serve", "/model", "--host", "127.0.0.1", "--port", "8000", *more)
    return export.ExportedRecipe(
        name="r", description="d", image="sparkpin/r:base-0123456789ab", argv=argv, env=env or {}, published=True,
        checkpoint=Path("/c"), origin=recipe.RecipeOrigin(
            model="acme/sample", model_revision="e" * 40, stack="spark", stage="base",
        ),
    )  # fmt: skip


def test_sparkrun_gets_a_commit_and_an_address_that_it_can_ask() -> None:
    value = export.value_of(exported(), "v2")
    assert f"--revision {'e' * 40}" in value["command"] and "{model_revision}" not in value["command"]
    assert value["model_revision"] == "e" * 40 and value["defaults"]["host"] == "0.0.0.0"
    assert export.value_of(exported(), "v1")["defaults"]["host"] == "127.0.0.1"


@pytest.mark.parametrize("form", ["v1", "v2"])
def test_an_exported_value_does_not_end_its_quotes(form: str, tmp_path: Path) -> None:
    name = "a'; touch X; 'b {port}"
    text = export.export(exported(None, "--served-model-name", name), form)  # type: ignore[arg-type]
    (tmp_path / "r.yaml").write_text(text)
    made = render.render(recipe.load(tmp_path / "r.yaml"))
    assert made.argv[-2:] == ("--served-model-name", name) and made.left == []


@pytest.mark.parametrize(
    ("host", "local"),
    [(["--host", "0.0.0.0"], ()), ([], ()), (["--host=0.0.0.0"], ()), (["--host", "localhost"], ("v1", "v2")),
     (["--host=127.0.0.1"], ("v1",)), (["--host", "127.0.0.1"], ("v1",)), (["--host=127.0.0.2"], ("v1", "v2"))],
)  # fmt: skip
def test_an_export_that_listens_on_all_addresses_says_so(host: list[str], local: tuple[str, ...]) -> None:
    subject = replace(exported(), argv=("vllm", "serve", "/model", *host))
    for form in ("v1", "v2"):
        text = export.export(subject, form)  # type: ignore[arg-type]
        assert ("listens on all addresses, without an API key" not in text) == (form in local)


@pytest.mark.parametrize("words", [("--chat-template", "x {{a}}"), ("--served-model-name", "{model}")])
def test_words_that_sparkrun_would_change_are_not_exported(words: tuple[str, str]) -> None:
    assert export.export(exported(None, *words), "v1")
    with pytest.raises(ManifestError) as caught:
        export.export(exported(None, *words), "v2")
    assert caught.value.got == words[1]


def test_what_sparkrun_sets_on_a_spark(tmp_path: Path) -> None:
    def argv(**change: Any) -> tuple[str, ...]:
        return render.render(recipe.load(Path(written(tmp_path, {"model": "a/b"} | change)))).argv

    assert argv()[3:] == ("--gpu-memory-utilization", "0.8")
    assert argv(defaults={"gpu_memory_utilization": 0.5})[3:] == ("--gpu-memory-utilization", "0.5")


# What `check` says.


@pytest.mark.parametrize(
    ("model", "machines", "fits"),
    [("a/Big-397B-A17B-FP8", 1, False), ("a/Big-397B-A17B-FP8", 4, True), ("a/Big-397B-int4-AutoRound", 2, True),
     ("a/Big-122B-A10B", 1, False), ("a/Big-122B-A10B-NVFP4", 1, True), ("a/Big-397B-gguf", 1, True), ("a/b", 1, True)],
)  # fmt: skip
def test_weights_that_no_machine_holds(tmp_path: Path, model: str, machines: int, fits: bool) -> None:
    value = {"model": model, "command": "vllm serve {model} -tp {n}", "defaults": {"n": machines}}
    assert ([line for line in errors(tmp_path, **value) if "weights" in line] == []) is fits


@pytest.mark.parametrize("source", ["lock", "shapes", "cache", "no index"])
@pytest.mark.parametrize(("size", "fits"), [(200e9, False), (20e9, True)])
def test_weights_that_are_known_count_and_not_the_name(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, size: float, fits: bool
) -> None:
    """The names say 397 billion, 1 billion and nothing."""
    model = {"lock": "a/Big-397B", "shapes": "a/Big-397B", "cache": "a/big", "no index": "a/Big-1B"}[source]
    if source == "lock":
        for end in ("yaml", "lock"):
            path = project / f"pins/models/smollm2.{end}"
            text = path.read_text().replace("sparkpin/SmolLM2-135M-Instruct-Q4_1-BF16", model)
            path.write_text(text.replace('"size": 269060552', f'"size": {size:.0f}'))
    elif source == "shapes":
        shapes = {"repository": model, "source": "", "date": "", "guessed": [], "config": {}, "mtp_file": ""}
        shapes |= {"numbers": {}, "tensors": {"weight": ["BF16", [int(size) // 2]]}}
        (project / "pins/shapes/a").mkdir()
        (project / f"pins/shapes/{model}.json").write_text(json.dumps(shapes))
    else:
        repository, index = tmp_path / f"models--{model.replace('/', '--')}", {"metadata": {"total_size": int(size)}}
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text("0" * 40)
        (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
        text = json.dumps(index) if source == "cache" else "{}"
        (repository / "snapshots" / ("0" * 40) / "model.safetensors.index.json").write_text(text)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    read = recipe.load(Path(written(tmp_path, V2 | {"model": model})))
    lines = [*map(str, check.foreign_findings(project, read, manifests.load_stack(project, "spark")))]
    assert ([line for line in lines if "weights" in line] == []) is (fits or source == "no index")
    for method, counts in (("fp8", False), ("modelopt_fp4", True)):
        read = recipe.load(Path(written(tmp_path, V2 | {"model": model, "command": f"{V2['command']} -q {method}"})))
        lines = [*map(str, check.foreign_findings(project, read, manifests.load_stack(project, "spark")))]
        by_name = "397B" in model and not counts
        is_heavy = by_name or (counts and not fits and source != "no index")
        assert any("weights" in line for line in lines) is is_heavy, method


@pytest.mark.parametrize(
    "model", ["../../etc/passwd", "Qwen/..", "Qwen/../x", "a/b/c", "/etc", "a", "a/" + "b" * 300, "ä/b"]
)
def test_models_that_are_no_repository(paths: Paths, tmp_path: Path, model: str) -> None:
    (line,) = errors(tmp_path, model=model)
    assert line.startswith("error: model: ")
    with pytest.raises(ManifestError):
        add.add(paths, written(tmp_path, V2 | {"model": model}), no_lock=True)


@pytest.mark.parametrize("model", ['{"a": 1}', '["a"]', "1"])
def test_a_draft_model_that_is_no_text(paths: Paths, tmp_path: Path, model: str) -> None:
    flag = f"""--speculative-config '{{"model": {model}, "method": "eagle3"}}'"""
    file = written(tmp_path, V2 | {"command": f"vllm serve {{model}} {flag}", "defaults": {}})
    assert tasks.recipe_check(paths, [file, "scripted-tiny"])
    for task in (add.add, tasks.recipe_show):
        with pytest.raises(ManifestError) as caught:
            task(paths, file)
        assert caught.value.key.endswith("model")


@pytest.mark.parametrize("name", ["9" * 5000, "a" * 5000, "a" * 251])
def test_a_mod_whose_name_no_file_can_have(paths: Paths, tmp_path: Path, name: str) -> None:
    file = written(tmp_path, V1 | {"mods": [name]})
    tasks.recipe_check(paths, [file])
    add.add(paths, file, no_lock=True)
    assert "mods" not in yaml.safe_load((paths.project / "recipes/some-recipe.yaml").read_text())


HOSTILE = "a\u202eb\x1b[2J\nZc"


def test_no_terminal_obeys_a_recipe(paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    value = {"recipe_version": "9\u202e\n" + "x" * 5000, "command": "vllm serve {model} --served-model-name a\u202eb"}
    file = written(folder, V2 | {"defaults": {"\u202ed": 1}} | value)
    (folder / "other\u202e\n.yaml").write_text(Path(file).read_text())
    for what in (file, str(folder), str(folder / "other\u202e\n.yaml")):
        tasks.recipe_check(paths, [what])
    tasks.recipe_show(paths, file)
    shown = capsys.readouterr().out
    assert not [c for c in shown.replace("\n", "") if not c.isprintable()] and "\nZc" not in shown
    assert max(map(len, shown.splitlines())) < 2500
    assert "\\u202e" in shown


@pytest.mark.parametrize(
    ("model", "flags"),
    [("Qwen/Qwen3-Embedding-8B", ""), ("Qwen/Qwen3-VL-Reranker-8B", "--runner pooling"), ("a/b", "--convert embed"), 
     ("a/b", "--task score"), ("nomic-ai/nomic-embed-text-v2-moe", "")],
)  # fmt: skip
def test_what_makes_embeddings_or_scores_is_refused(paths: Paths, tmp_path: Path, model: str, flags: str) -> None:
    value = V2 | {"model": model, "command": f"vllm serve {{model}} {flags}", "defaults": {}}
    assert errors(tmp_path, **value)
    assert not errors(tmp_path, command="vllm serve {model} --runner generate", defaults={}, model="a/embedded-coder")
    with pytest.raises(ManifestError) as caught:
        add.add(paths, written(tmp_path, value), no_lock=True)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("change", "engine"),
    [({"runtime": "sglang", "command": None}, "SGLang"),
     ({"command": "python3 -m sglang.launch_server --model-path {model}"}, "SGLang"),
     ({"command": "llama-server -hf {model}"}, "llama.cpp"), ({"command": "ollama serve"}, "Ollama")],
)  # fmt: skip
def test_other_engines_are_named(tmp_path: Path, change: dict[str, Any], engine: str) -> None:
    value = {key: part for key, part in (V2 | {"defaults": {}} | change).items() if part is not None}
    (line,) = found(tmp_path, value)
    assert line.startswith("error") and engine in line


@pytest.mark.parametrize(
    "change", [{"command": "vllm serve a/b " + "{" * 30_000}, {"description": ["{" * 30_000]}, {"mods": ["{" * 30_000]}]
)
@pytest.mark.parametrize("version", ["1", "2"])
def test_nothing_is_printed_whole_that_is_long(
    paths: Paths, tmp_path: Path, change: dict[str, Any], version: str
) -> None:
    value = V1 | {"recipe_version": version, "name": "R"} | change
    try:
        said = "\n".join(found(tmp_path, value))
    except ManifestError as error:
        said = str(error)
    assert len(said) < 3000


@pytest.mark.parametrize(
    "change",
    [
        {"env": {f"VLLM_A{number}": 1 for number in range(300)}},
        {f"key{number}": 1 for number in range(300)},
        {"command": "vllm serve a/b" + " --a" * 600},
        {"command": "vllm serve a/b " + " ".join(f"{{a{number}}}" for number in range(300))},
        {"command": "A=$A$A\n" * 30 + "vllm serve a/b $A", "env": {"A": "x"}},
        {"command": "vllm serve a/b " + "${B:-$A}" * 5000, "env": {"A": "x" * 5000}},
        {"command": "a;" * 600 + "vllm serve a/b"},
        {"command": "vllm serve a/b " + "${A:-" * 20_000},
        {"include": "a" * 300},
    ],
)
def test_more_than_a_recipe_has_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    try:
        told = errors(tmp_path, **change)
    except ManifestError as error:
        told = [str(error)]
    assert told and max(map(len, told)) < 1000

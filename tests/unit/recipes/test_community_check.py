"""`invoke recipe check`: the mistakes that people make, each told with what mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from places import PROJECT

from sparkpin.build.pair import pair
from sparkpin.cli import notes as commands_notes
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests
from sparkpin.recipes import check, recipe
from sparkpin.recipes.vllm_parser import parser_of

V1 = {"recipe_version": "1", "name": "R", "model": "a/SmolLM2-b", "container": "vllm-node"}
V2 = {"recipe_version": "2", "model": "a/SmolLM2-b", "runtime": "vllm", "container": "vllm-node"}
SPECULATION = """--speculative-config '{{"method": "mtp", %s}}'"""


def found(folder: Path, base: dict[str, Any], command: str | None, stack: str = "spark", **more: Any) -> list[str]:
    value = base | more | ({} if command is None else {"command": command})
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    told = check.foreign_findings(PROJECT, recipe.load(path), manifests.load_stack(PROJECT, stack))
    elsewhere = (
        "no --gpu-memory-utilization: ",
        "its size is unknown",
    )  # test_known_issues.py, test_sources.py
    return [line for line in map(str, told) if not any(part in line for part in elsewhere)]


def served(folder: Path, flags: str, stack: str = "spark", model: str = "a/SmolLM2-b", **more: Any) -> list[str]:
    return found(folder, V1 | {"model": model}, f"vllm serve {model} {flags}", stack, **more)


def test_nothing_is_found_in_a_good_recipe(tmp_path: Path) -> None:
    command = (
        "vllm serve a/SmolLM2-b --port {port} -tp 1 --enable-auto-tool-choice --tool_call_parser qwen3_coder -O3 "
        "--limit-mm-per-prompt.image 2 -cc.mode 3 --no-enable-prefix-caching --kv-cache-dtype FP8 --max-model-l 5 "
        """--speculative-config '{{"method": "mtp", "num_speculative_tokens": 1}}' --default-chat-template-kwargs.a=b"""
    )
    assert found(tmp_path, V1, command, defaults={"port": 1}, env={"VLLM_MARLIN_USE_ATOMIC_ADD": 1, "OTHER": "x"}) == []


@pytest.mark.parametrize(
    ("flags", "stack", "severity", "named"),
    [
        ("--gpu-memory-utilisation 0.8", "spark", "error", "did you mean --gpu-memory-utilization?"),
        ("--no-port 3", "spark", "error", "--no-port"),
        ("--tool-call-parser qwen3_code --enable-auto-tool-choice", "spark", "error", "qwen3_coder?"),
        ("--reasoning-parser xyzzy", "spark", "error", "it has "),
        ("--chat-template no.jinja", "spark", "error", "no.jinja"),
        ("--kv-cache-dtype fp9", "spark", "warning", "did you mean fp8"),
        ("--enforce-eager true", "spark", "error", "--enforce-eager"),
        ("""--speculative-config '{{"method": "mpt"}}'""", "spark", "error", "did you mean mtp?"),
        (SPECULATION % '"num_speculative_token": 1', "spark", "error", "did you mean num_speculative_tokens?"),
        ("""--override-generation-config '{{"a": 1,}}'""", "spark", "error", '{"a": 1,}'),
        ("b/c", "spark", "error", "b/c"),
    ],
)  # fmt: skip
def test_words_of_the_command(tmp_path: Path, flags: str, stack: str, severity: str, named: str) -> None:
    (line,) = served(tmp_path, flags, stack)
    assert line.startswith(f"{severity}: command: ") and named in line


@pytest.mark.parametrize(
    ("flags", "stack"),
    [
        ("--distributed-executor-backend ray", "spark"),  # the runner leaves it out on one machine
        ("--gpu-memory-utilization 0.95", "cpu"),
        ("--max-model-len -1 --max-num-seqs 1 --block-size 16", "spark"),
        ("--max-model-len 32k --max-num-batched-tokens 2K --kv-cache-memory-bytes 1.5g", "spark"),
        (SPECULATION % '"num_speculative_tokens": 2', "spark"),
        ("--speculative-config.method mtp --speculative-config.max-model-len 9", "spark"),
        (SPECULATION % '"max-model-len": 9', "spark"),
    ],
)
def test_words_that_are_no_mistake(tmp_path: Path, flags: str, stack: str) -> None:
    assert served(tmp_path, flags, stack) == []


@pytest.mark.parametrize(
    ("model", "flags", "warned"),
    [
        ("a/DeepSeek-V4.1-x", "--tool-call-parser deepseek_v4", True),
        ("a/DeepSeek-V4.1-x", "--tokenizer-mode deepseek_v41", False),
        ("a/GLM-5.3-x", "--reasoning-parser glm47", False),  # one class
        ("a/MiniMax-M2.5", "--reasoning-parser minimax_m2_append_think", False),
        ("a/Qwen3.8-27B", "--tool-call-parser hermes", True),
        ("a/b", "--tool-call-parser hermes", True),
        ("a/b", "--tool-call-parser hermes --reasoning-parser qwen3", False),
    ],
)
def test_parsers_that_do_not_fit_the_model(tmp_path: Path, model: str, flags: str, warned: bool) -> None:
    lines = served(tmp_path, f"{flags} --enable-auto-tool-choice", model=model)
    assert bool([line for line in lines if line.startswith("warning: command") and "famil" in line]) == warned


def test_what_breaks_with_models_of_linear_attention(tmp_path: Path) -> None:
    mtp = """--enable-prefix-caching --speculative-config '{{"method": "qwen3_5_mtp", "num_speculative_tokens": 3}}'"""
    parts = "--enable-prefix-caching --speculative-config.method mtp --speculative-config.num_speculative_tokens 1"
    default = mtp.removeprefix("--enable-prefix-caching ")
    off = mtp.replace("--enable", "--no-enable")
    for flags in (mtp, parts, default, off + " --enable-prefix-caching"):  # the last one counts
        assert any("together with MTP" in line for line in served(tmp_path, flags, model="Qwen/Qwen3.6-1B"))
    assert served(tmp_path, mtp, model="meta/Llama-3.1-8B") == served(tmp_path, off, model="Qwen/Qwen3.5-1B") == []


def test_a_cache_type_depends_on_the_mod_of_the_stage(tmp_path: Path) -> None:
    flag = "--kv-cache-dtype turboquant_4bit_nc"
    for stage in ("base", "v2"):
        (line,) = served(tmp_path, flag, container=f"sparkpin/stack-spark:{stage}-0123456789ab")
        assert line.startswith("warning: command: --kv-cache-dtype") and f"stage {stage} has no mod turboquant" in line
    assert served(tmp_path, flag, container="sparkpin/stack-spark:v2-tq-0123456789ab") == []
    assert keys_of(served(tmp_path, "--kv-cache-dtype turboquant35")) == ["error: --kv-cache-dtype"]


@pytest.mark.parametrize(
    ("recipe_name", "stage", "flags", "wanted"),
    [
        ("qwen3.5-122b", "v2", "--kv-cache-dtype turboquant_4bit_nc", ["no mod turboquant", "together with MTP"]),
        ("scripted-tiny", "v2-tq", "--kv-cache-dtype turboquant35", ["expected turboquant_4bit_nc"]),
    ],
)
def test_the_same_text_outside_of_recipes(
    project: Path, tmp_path: Path, recipe_name: str, stage: str, flags: str, wanted: list[str]
) -> None:
    """A recipe of ours is held against what its stack and stages set, wherever its file lies."""
    value = yaml.safe_load((project / f"recipes/{recipe_name}.yaml").read_text())
    value |= {"name": "same", "stage": stage, "command": f"{value['command'].strip()} {flags}"}
    for folder in (project / "recipes", tmp_path):
        (folder / "same.yaml").write_text(yaml.safe_dump(value, sort_keys=False))
    inside = [str(one) for one in check.check(project, "same").found if one.key != "model"]  # that import would lock
    read = recipe.load(tmp_path / "same.yaml")
    outside = [str(one) for one in check.foreign_findings(project, read, manifests.load_stack(project, value["stack"]))]
    assert outside == inside and len(inside) == len(wanted)
    assert all(part in line for part, line in zip(wanted, inside, strict=True)), inside


def keys_of(lines: list[str]) -> list[str]:
    """Severity and key of each."""
    return [": ".join(line.split(": ", 2)[:2]) for line in lines]


def test_keys_that_nobody_knows_or_uses(tmp_path: Path) -> None:
    lines = found(tmp_path, V1, "vllm serve a/SmolLM2-b --port {port} --served-model-name x",
                  defaults={"port": 1, "writing_config": "{}"}, descripton="d")  # fmt: skip
    assert keys_of(lines) == ["warning: descripton", "warning: defaults.writing_config"]
    assert lines[0].endswith("did you mean description?")
    lines = found(tmp_path, V2, "vllm serve {model} --port {port}", defaults={"port": 1, "tensor_parallel": 1, "x": 1})
    assert keys_of(lines) == ["warning: defaults.x"]
    (line,) = found(tmp_path, V2, None, defaults={"port": 1, "load_fromat": "auto"})
    assert keys_of([line]) == ["warning: defaults.load_fromat"] and line.endswith("did you mean load_format?")


@pytest.mark.parametrize(
    ("base", "words", "defaults"),
    [
        (V1, "--port {prot}", {"port": 1}),
        (V1, "'{{\"n\": 1}'", {}),
        (V1, "--port {{ port }}", {"port": 1}),  # Jinja's
        (V1, "--enforce-eager \\ \n  --port 1", {}),  # a blank after the backslash
        (V2, "--speculative-config '{s}'", {"s": {"method": "mtp"}}),
        (V2, "--trust-remote-code {s}", {"s": True}),
        (V1, "--dtype {s}", {"s": None}),
    ],
)
def test_templates_that_do_not_come_to_what_is_meant(
    tmp_path: Path, base: dict[str, Any], words: str, defaults: dict[str, Any]
) -> None:
    lines = found(tmp_path, base, f"vllm serve a/SmolLM2-b {words}", defaults=defaults)
    assert lines and lines[0].startswith("error: command")


def test_environment(tmp_path: Path) -> None:
    lines = served(tmp_path, "", env={"VLLM_MARLIN_USE_ATOMIC_AD": 1, "J": '{"a": 1}', "H": "$HOME/x"})
    assert keys_of(lines) == ["warning: env.H", "warning: env.VLLM_MARLIN_USE_ATOMIC_AD"]
    assert lines[-1].endswith("VLLM_MARLIN_USE_ATOMIC_ADD?")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (V2 | {"command": "vllm serve {model} -tp 1", "min_nodes": 3}, "--tensor-parallel-size 1"),
        (V2 | {"command": "vllm serve {model} -tp 2", "mode": "solo"}, "--tensor-parallel-size 2"),
        (V2 | {"command": "vllm serve {model} -tp 2 -dp 2"}, "no data parallelism"),
        (V2 | {"command": "vllm serve {model} -pp 2 -sc.method mtp"}, "--speculative-config"),
        (V2 | {"command": "vllm serve {model} -tp 1 -pp 2", "model": "Qwen/Qwen3.6-1B"}, "--pipeline-parallel-size"),
        (V2 | {"command": "vllm serve {model} -tp 3", "model": "Intel/Qwen3.5-35B-A3B-int4-AutoRound"}, "KV heads"),
        (V2 | {"command": "vllm serve {model} -tp 3", "min_nodes": 3}, "3 machines can share"),
        (V1 | {"command": "vllm serve c/d"}, "c/d"),
        (V2 | {"command": "vllm serve {model} --distributed-executor-backend=ray"}, "no ray"),
    ],
)  # fmt: skip
def test_of_the_whole(tmp_path: Path, value: dict[str, Any], named: str) -> None:
    assert any(named in line for line in found(tmp_path, value, None))


def test_a_recipe_for_a_cluster_that_fits_is_no_mistake(tmp_path: Path) -> None:
    command = "vllm serve {model} -tp {tensor_parallel}"
    model = "Intel/Qwen3.5-122B-A10B-int4-AutoRound"
    assert found(tmp_path, V2 | {"model": model}, command, defaults={"tensor_parallel": 2}, min_nodes=2) == []


@pytest.mark.parametrize(
    "more", [{"cluster_only": True, "solo_only": True}, {"min_nodes": 4, "max_nodes": 2}, {"max_nodes": 0}]
)
def test_numbers_of_machines_that_cannot_be(tmp_path: Path, more: dict[str, Any]) -> None:
    assert [line for line in found(tmp_path, V2 | more, "vllm serve {model}") if line.startswith("error: nodes")]


def test_a_release_that_nothing_is_recorded_of() -> None:
    wanted = {"0.1.0": "0.32.0", "0.32.1": "0.32.0", "0.40.0": "0.33.0", "dev": "0.33.0", "": "0.33.0"}
    assert {version: parser_of(version).version for version in wanted} == wanted


@pytest.mark.parametrize("name", sorted(path.stem for path in (PROJECT / "recipes").glob("*.yaml")))
def test_our_own_recipes_have_no_errors(name: str) -> None:
    lines = [str(one) for one in check.check(PROJECT, name).found]
    assert not [line for line in lines if line.startswith("error")], lines
    is_locked = not manifests.unlocked(PROJECT, manifests.model_of(PROJECT, manifests.load_recipe(PROJECT, name)))
    assert is_locked or [line for line in lines if "next: invoke lock --model" in line]


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("description:", "descripton:", "descripton"),
        ("stack: cpu", "stack: cpuu", "(whole file)"),
        ("stage: v2-tq", "stage: v2-tq\nmods: [nope]", "mods"),
        ("model_revision: ", "model_revision: a #", "model_revision"),
        ("--reasoning-parser qwen3 ", "-cc {{1}} ", "command"),
        ("--reasoning-parser qwen3 ", "--ssl-keyfile k ", "command"),
        ("parser qwen3_coder", "parser qwen3_coder --kv-cache-dtype turboquant35", "--kv-cache-dtype"),
        ("{port}", "{prot}", "command"),
        ("port: 8000", "port: [1]", "defaults.port"),
    ],
)
def test_a_fault_of_a_recipe_of_ours(project: Path, old: str, new: str, key: str) -> None:
    path = project / "recipes/scripted-tiny.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    (error,) = check.check(project, "scripted-tiny").errors
    assert error.key == key


def test_a_build_tells_of_what_vllm_will_refuse(project: Path) -> None:
    paths = Paths(project, project.with_name("cache"), project.with_name("home"))
    right = commands_notes.notes_of(paths, pair(project, "scripted-tiny")[-1])
    assert not any(line.startswith("warning") for line in right)
    file = project / "recipes/scripted-tiny.yaml"
    file.write_text(file.read_text().replace("--max-num-seqs", "--max-nums-seqs"))
    (line,) = set(commands_notes.notes_of(paths, pair(project, "scripted-tiny")[-1])) - set(right)
    assert line.startswith("warning: recipes/scripted-tiny.yaml: command: ") and "--max-nums-seqs" in line


def test_which_recipe_is_meant(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = project / "recipes/scripted-tiny.yaml"
    assert check.file_or_name(project, "scripted-tiny") == (own, True)
    assert check.file_or_name(project, str(own)) == (own, True)
    (tmp_path / "mine.yaml").write_text("")
    assert check.file_or_name(project, "mine.yaml") == (Path("mine.yaml"), False)
    with pytest.raises(InputError, match="no recipe 'scripted-tin'"):
        check.file_or_name(project, "scripted-tin")

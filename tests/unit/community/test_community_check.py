"""`invoke recipe check`: the mistakes that people make, each told with what mends it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import PROJECT

from sparkpin.build.pair import pair
from sparkpin.commands import notes as commands_notes
from sparkpin.commands import recipe as tasks
from sparkpin.community import check, recipe, render, wheelflags
from sparkpin.community.release import known_versions, nearest, release
from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests
from sparkpin.pins.families import vllm_version

V1 = {"recipe_version": "1", "name": "R", "model": "a/b", "container": "vllm-node"}
V2 = {"recipe_version": "2", "model": "a/b", "runtime": "vllm", "container": "vllm-node"}
BY_USERS = "num_speculative_tokens_per_batch_size"
LENGTHS = """--speculative-config '{{"method": "mtp", "num_speculative_tokens": 2, "%s": %s}}'"""


def found(folder: Path, base: dict[str, Any], command: str | None, stack: str = "spark", **more: Any) -> list[str]:
    value = base | more | ({} if command is None else {"command": command})
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    told = check.foreign_findings(PROJECT, recipe.load(path), manifests.load_stack(PROJECT, stack))
    return [line for line in map(str, told) if "no --gpu-memory-utilization: " not in line]  # test_known_issues.py


def served(folder: Path, flags: str, stack: str = "spark", model: str = "a/b", **more: Any) -> list[str]:
    return found(folder, V1 | {"model": model}, f"vllm serve {model} {flags}", stack, **more)


def test_nothing_is_found_in_a_good_recipe(tmp_path: Path) -> None:
    command = (
        "vllm serve a/b --port {port} -tp 1 --enable-auto-tool-choice --tool_call_parser qwen3_coder -O3 "
        "--limit-mm-per-prompt.image 2 -cc.mode 3 --no-enable-prefix-caching --kv-cache-dtype FP8 --max-model-l 5 "
        """--speculative-config '{{"method": "mtp", "num_speculative_tokens": 1}}' --default-chat-template-kwargs.a=b"""
    )
    assert found(tmp_path, V1, command, defaults={"port": 1}, env={"VLLM_MARLIN_USE_ATOMIC_ADD": 1, "OTHER": "x"}) == []


@pytest.mark.parametrize(
    ("flags", "stack", "wanted"),
    [
        ("--gpu-memory-utilisation 0.8", "spark",
         "has no flag --gpu-memory-utilisation; did you mean --gpu-memory-util"),
        ("--max_num_sequences 4", "spark", "has no flag --max_num_sequences; did you mean --max-num-seqs?"),
        ("--disable-log-requests", "spark", "vLLM 0.33.0 has no flag --disable-log-requests"),
        ("--no-port 3", "spark", "vLLM 0.33.0 has no flag --no-port"),
        ("--tool-call-parser qwen3_code --enable-auto-tool-choice", "spark",
         "no such parser; did you mean qwen3_coder?"),
        ("--tool-call-parser qwen3 --enable-auto-tool-choice", "spark", "qwen3_xml or qwen3_json or qwen3_coder?"),
        ("--reasoning-parser xyzzy", "spark", "no such parser; it has "),
        ("--reasoning-parser qwen_3", "spark",
         "--reasoning-parser qwen_3: vLLM 0.33.0 has no such parser; did you mean"),
        ("--enable-auto-tool-choice", "spark", "without --tool-call-parser: vLLM refuses"),
        ("--tool-call-parser hermes", "spark", "does nothing without --enable-auto-tool-choice"),
        ("--chat-template no.jinja", "spark", "no mod and no template of this project brings that file"),
        ("--kv-cache-dtype fp9", "spark", "--kv-cache-dtype fp9: not among what vLLM 0.33.0 has; did you mean fp8"),
        ("--load-format instant_tensor", "spark", "did you mean instanttensor?"),
        ("--load-format instanttensor", "cpu", "the stack's lock has no instanttensor"),
        ("--distributed-executor-backend ray", "spark", ""),  # the runner leaves it out on one machine
        ("--enforce-eager true", "spark", "--enforce-eager takes no value, and 'true' follows it"),
        ("--port", "spark", "--port wants a value"),
        ("--port 1 --port 2", "spark", "--port comes after --port: the last one counts"),
        ("-tp 1 --tensor-parallel-size 1", "spark", "--tensor-parallel-size comes after -tp: the last one counts"),
        ("-pp 2", "spark", "--pipeline-parallel-size 2: one machine has one GPU here"),
        ("""--speculative-config '{{"method": "mpt"}}'""", "spark", "has no method 'mpt'; did you mean mtp?"),
        ("""--speculative-config '{{"model": "x/y"}}'""", "spark", "the draft model x/y is not fetched"),
        ("""--override-generation-config '{{"a": 1,}}'""", "spark", '{"a": 1,} is no JSON'),
        ("b/c", "spark", "'b/c' is no flag, and the model stands there already"),
        ("--gpu-memory-utilization 0.95", "spark", "--gpu-memory-utilization 0.95: the host shares that memory"),
        ("--gpu-memory-utilization 0.95", "cpu", ""),
        ("--gpu-memory-utilization=80", "cpu", "--gpu-memory-utilization: saw '80', wanted a number above 0 and not"),
        ("--max-model-len -5", "spark", "error: command: --max-model-len: saw '-5', wanted a positive number such as"),
        ("--max-model-len -1 --max-num-seqs 1 --block-size 16", "spark", ""),  # -1: as long as fits
        ("--max-num-seqs -1", "spark", "--max-num-seqs: saw '-1', wanted a positive number"),
        ("--max-model-len 32k --max-num-batched-tokens 2K --kv-cache-memory-bytes 1.5g", "spark", ""),
        ("--enable-prefix-caching", "cpu", "--enable-prefix-caching: on a CPU"),
        ("--trust-remote-code", "spark", "note: command: --trust-remote-code: it runs Python"),
        (LENGTHS % (BY_USERS, "[[1, 7, 2], [8, 8, 1]]"), "spark", ""),
        (LENGTHS % (BY_USERS, "[[1, 7, 2], [8, 8, 1]]"), "cpu", ""),
        (LENGTHS % (BY_USERS.replace("per_batch", "by_batch"), 1), "spark", f"did you mean {BY_USERS}?"),
        ("--speculative-config.method mtp --speculative-config.max-model-len 9", "spark", ""),
        ("""--speculative-config '{{"method": "mtp", "max-model-len": 9}}'""", "spark", ""),
        ("--max-num-batched-tokens 32768", "spark", "has run out of memory on a saturated Spark"),
        ("--load-format fastsafetensors", "spark", "holds a part of the weights twice"),
    ],
)  # fmt: skip
def test_words_of_the_command(tmp_path: Path, flags: str, stack: str, wanted: str) -> None:
    lines = served(tmp_path, flags, stack)
    assert len(lines) == bool(wanted), lines
    assert all(wanted in line for line in lines), lines


def test_what_breaks_with_models_of_linear_attention(tmp_path: Path) -> None:
    mtp = """--enable-prefix-caching --speculative-config '{{"method": "qwen3_5_mtp", "num_speculative_tokens": 3}}'"""
    (line,) = served(tmp_path, mtp, model="Intel/Qwen3.5-122B-A10B-int4-AutoRound")
    assert line.startswith("note: command: --speculative-config.method qwen3_5_mtp: together with MTP")
    assert "invoke prove" in line
    assert served(tmp_path, mtp, model="meta/Llama-4") == []
    (line, *_) = served(tmp_path, mtp, "cpu", model="Qwen/Qwen3.5-1B")
    assert line.startswith("warning: command: --enable-prefix-caching: together with MTP") and "#53912" in line
    off = mtp.replace("--enable", "--no-enable")
    assert served(tmp_path, off, model="Qwen/Qwen3.5-1B") == []
    (line,) = served(tmp_path, "--prefix-match-unit 32", model="Qwen/Qwen3.5-1B")
    assert line.startswith("warning: command: --prefix-match-unit 32: a hit that ends inside a block")
    assert served(tmp_path, "--prefix-match-unit 32 --no-enable-prefix-caching", model="Qwen/Qwen3.5-1B") == []
    lines = served(tmp_path, off + " --enable-prefix-caching", model="Qwen/Qwen3.5-1B")
    assert any("together with MTP" in line for line in lines), "the last one counts"
    parts = "--enable-prefix-caching --speculative-config.method mtp --speculative-config.num_speculative_tokens 1"
    (line,) = served(tmp_path, parts, model="Qwen/Qwen3.6-1B")
    assert "together with MTP" in line
    tools = mtp.removeprefix("--enable-prefix-caching ") + " --enable-auto-tool-choice --tool-call-parser qwen3_coder"
    (line,) = served(tmp_path, tools, model="Qwen/Qwen3.5-1B")
    assert line.startswith("note:") and "together with MTP" in line, "where it is on by default"


def test_a_cache_type_depends_on_the_mod_of_the_stage(tmp_path: Path) -> None:
    said = "warning: command: --kv-cache-dtype turboquant_4bit_nc: the image of stage {} has no mod turboquant; "
    flag = "--kv-cache-dtype turboquant_4bit_nc"
    (line,) = served(tmp_path, flag, model="Qwen/Qwen3.5-1B")
    assert line.startswith(said.format("base")) and line.endswith("; stage v2-tq has it; else leave the flag out")
    (line,) = served(tmp_path, flag, container="sparkpin/stack-spark:v2-0123456789ab")
    assert line.startswith(said.format("v2"))
    assert served(tmp_path, flag, container="sparkpin/stack-spark:v2-tq-0123456789ab") == []
    (line,) = served(tmp_path, "--kv-cache-dtype turboquant35")
    assert line.startswith("error: --kv-cache-dtype: saw 'turboquant35', wanted turboquant_4bit_nc (")


@pytest.mark.parametrize(
    ("recipe_name", "stage", "flags", "wanted"),
    [
        ("qwen3.5-122b", "v2-tq", "--kv-cache-dtype turboquant_4bit_nc", ["together with MTP"]),
        ("qwen3.5-122b", "v2", "--kv-cache-dtype turboquant_4bit_nc", ["no mod turboquant", "together with MTP"]),
        ("scripted-tiny", "v2", "--kv-cache-dtype turboquant_4bit_nc", ["the image of stage v2 has no mod turboquant"]),
        ("scripted-tiny", "v2-tq", "--kv-cache-dtype turboquant35", ["saw 'turboquant35', wanted turboquant_4bit_nc"]),
        ("scripted-tiny", "v9", "", ["unknown stage 'v9'"]),
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
    inside = [str(one) for one in check.own_findings(project, "same") if one.key != "model"]  # that import would lock
    read = recipe.load(tmp_path / "same.yaml")
    outside = [str(one) for one in check.foreign_findings(project, read, manifests.load_stack(project, value["stack"]))]
    assert outside == inside and len(inside) == len(wanted)
    assert all(part in line for part, line in zip(wanted, inside, strict=True)), inside


def test_keys_that_nobody_uses_or_gives(tmp_path: Path) -> None:
    lines = found(tmp_path, V1, "vllm serve a/b --port {prot} --served-model-name x",
                  defaults={"port": 1, "writing_config": "{}"}, descripton="d")  # fmt: skip
    assert lines == [
        "error: command: {prot} is no key of `defaults`: it does not start; did you mean port?",
        "warning: descripton: spark-vllm-docker does not know this key; did you mean description?",
        "warning: defaults.port: nothing uses it; did you mean prot?",
        "warning: defaults.writing_config: nothing uses it; remove it, or write {writing_config} in the command",
    ]
    lines = found(tmp_path, V2, "vllm serve {model} --port {prot}", defaults={"tensor_parallel": 1, "unused": 1})
    assert [line.partition(";")[0] for line in lines] == [
        "error: command: {prot} is no key of `defaults`: the braces reach vLLM as they stand",
        "warning: defaults.unused: nothing uses it",
    ]
    assert found(tmp_path, V2, None, defaults={"port": 1, "load_fromat": "auto"}) == [
        "warning: defaults.load_fromat: becomes no flag: sparkrun leaves it out; did you mean load_format?"
    ]


BRACE = "error: command: a single brace that is no placeholder: version 1 does not start; "


@pytest.mark.parametrize(
    ("words", "end"),
    [
        *(
            (word, BRACE + "double the braces of JSON, {{ and }}")
            for word in ("'{\"method\": 1}'", "'{{\"n\": 1}'", "{port")
        ),
        ("--port { port }", BRACE + "write {port} without blanks"),
        ("--port {port} --x ${PORT:-8000}", "a variable of the shell is written ${{PORT}}"),
        ("--port {port} {model}", "is no key of `defaults`: it does not start; add it to `defaults`"),
    ],
)
def test_single_braces_in_version_1(tmp_path: Path, words: str, end: str) -> None:
    lines = found(tmp_path, V1, f"vllm serve a/b {words}", defaults={"port": 1})
    assert lines[0].startswith("error: command: ") and lines[0].endswith(end)


@pytest.mark.parametrize("base", [V1, V2])
def test_placeholders_of_other_tools(tmp_path: Path, base: dict[str, Any]) -> None:
    lines = found(tmp_path, base, "vllm serve a/b --port {{ port }} --seed ${{SEED}}", defaults={"port": 1})
    assert "error: command: {{ port }} is text here, with single braces: only Jinja fills it in; write {port}" in lines
    assert not [line for line in lines if "{{ SEED" in line], "that is how the shell's ${SEED} is written"


def test_a_blank_after_a_backslash(tmp_path: Path) -> None:
    lines = found(tmp_path, V1, "vllm serve a/b \\\n  --enforce-eager \\ \n  --port 1")
    assert lines == [
        "error: command, line 2: a blank after the backslash: bash ends the command there; remove the blank",
        "error: command: the command has ended before this line, so the server never gets it: --port 1; "
        "look for a comment or a blank after a backslash above it",
        "error: command: --enforce-eager takes no value, and a blank after a backslash follows it; "
        "remove what follows it",
    ]
    (line,) = found(tmp_path, V2, "vllm serve {model} \\\n  --enforce-eager \\\t\n  --port 1")
    assert line.startswith("note: command, line 2: a blank after the backslash") and "sparkrun removes it" in line


def test_values_that_do_not_say_what_they_seem_to(tmp_path: Path) -> None:
    lines = found(tmp_path, V2, "vllm serve {model} --speculative-config '{s}' --trust-remote-code {t}",
                  defaults={"s": {"method": "mtp"}, "t": True}, env={"A": None})  # fmt: skip
    assert any(line.startswith("error: defaults.s: goes into the command as Python writes it") for line in lines)
    assert "warning: defaults.t: goes into the command as True; write what vLLM is to read" in lines
    assert "warning: env.A: no value: the variable is set to the word None; remove it" in lines
    lines = found(tmp_path, V1, "vllm serve a/b --dtype {d}", defaults={"d": None})
    assert lines == ["warning: defaults.d: goes into the command as None; write what vLLM is to read"]
    lines = found(tmp_path, V2, "vllm serve {model} --port {p}", defaults={"p": None})
    assert lines[0].startswith("error: command: {p} has no value in `defaults`: the braces reach vLLM as they stand")


def test_environment(tmp_path: Path) -> None:
    lines = served(tmp_path, "", env={"VLLM_MARLIN_USE_ATOMIC_AD": 1, "J": '{"a": 1}', "H": "$HOME/x"})
    assert lines == [
        "warning: env.J: the runner's script hands over {a: 1}; JSON in `env` loses its quotes in version 1; in "
        "sparkpin it keeps them",
        "warning: env.H: version 1 has bash expand it; in sparkpin it stays as written; write the value itself",
        "warning: env.VLLM_MARLIN_USE_ATOMIC_AD: vLLM 0.33.0 does not know this variable; did you mean "
        "VLLM_MARLIN_USE_ATOMIC_ADD?",
    ]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (V2 | {"command": "sglang serve --model-path {model}"}, "SGLang is another engine"),
        (V2 | {"command": "vllm serve {model} -tp 1", "min_nodes": 3}, "a command for 1: --tensor-parallel-size 1"),
        (V2 | {"command": "vllm serve {model} -tp 4", "max_nodes": 3}, "wanted 1 to 3 machines"),
        (V2 | {"command": "vllm serve {model} -tp 16"}, "wanted 1 to 8 machines"),
        (V2 | {"command": "vllm serve {model} -tp 2", "mode": "solo"}, "2: one machine has one GPU here"),
        (V2 | {"command": "vllm serve {model} -tp 2 -dp 2"}, "wanted no data parallelism"),
        (V1 | {"command": "vllm serve a/b --nnodes two"}, "--nnodes two"),
        (
            V2 | {"command": "vllm serve {model} -pp 2 -sc.method mtp"},
            "--pipeline-parallel-size 2 with --speculative-config",
        ),
        (V2 | {"command": "vllm serve {model} -tp 1 -pp 2", "model": "Qwen/Qwen3.6-1B"}, "garbled text when vLLM 0.33"),
        (
            V2 | {"command": "vllm serve {model} -tp 3", "model": "Intel/Qwen3.5-35B-A3B-int4-AutoRound"},
            "KV heads (2) over 3",
        ),
        (V1 | {"command": "vllm serve c/d"}, "the command serves c/d, and `model` is a/b"),
        (V1 | {"command": "vllm serve a/b $(hostname)"}, "only a shell could expand"),
        (V2 | {"command": "vllm serve {model} '{{}}'"}, "doubled braces are version 1's"),
        (V2 | {"command": "vllm serve {model} --distributed-executor-backend=ray"}, "the stack's lock has no ray"),
        (V1 | {"command": "vllm serve a/b | tee log"}, "| tee log is no part of the server's command"),
        (V1 | {"command": "vllm serve a/b --ssl-keyfile k"}, "--ssl-keyfile: the images here are asked by plain HTTP"),
        (V1 | {"command": "python3 -m vllm.entrypoints.openai.api_server --model c/d"}, "the command serves c/d"),
    ],
)
def test_of_the_whole(tmp_path: Path, value: dict[str, Any], wanted: str) -> None:
    assert any(wanted in line for line in found(tmp_path, value, None))


def test_a_recipe_for_a_cluster_that_fits_is_no_mistake(tmp_path: Path) -> None:
    command = "vllm serve {model} -tp {tensor_parallel}"
    model = "Intel/Qwen3.5-122B-A10B-int4-AutoRound"
    assert found(tmp_path, V2 | {"model": model}, command, defaults={"tensor_parallel": 2}, min_nodes=2) == []
    for nodes, there in ((2, True), (1, False)):  # a setting for two machines only
        when = {"when": {"nodes": nodes}, "defaults": {"seed": 7}}
        value = {**V2, "command": command + " --seed {seed}", "overrides": [when]}
        (tmp_path / "o.yaml").write_text(yaml.safe_dump(value | {"defaults": {"tensor_parallel": 2, "seed": 1}}))
        assert (render.render(recipe.load(tmp_path / "o.yaml")).argv[-1] == "7") == there


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"cluster_only": True, "solo_only": True}, "one and several machines"),
        ({"min_nodes": 4, "max_nodes": 2}, "4 or more"),
        ({"max_nodes": 0}, "a number of machines"),
    ],
)
def test_numbers_of_machines_that_cannot_be(tmp_path: Path, more: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ManifestError, match=wanted):
        found(tmp_path, V2 | more, "vllm serve {model}")


def test_a_release_that_nothing_is_recorded_of(tmp_path: Path) -> None:
    assert known_versions() == ["0.32.0", "0.33.0"]
    assert [release(v).version for v in ("0.1.0", "0.32.1", "0.40.0", "dev")] == [
        "0.32.0",
        "0.32.0",
        "0.33.0",
        "0.33.0",
    ]
    assert nearest("xyzzy", ["--port"]) == ""
    stacks = [manifests.load_stack(PROJECT, path.stem) for path in (PROJECT / "pins/stacks").glob("*.yaml")]
    assert set(map(vllm_version, stacks)) <= set(known_versions())


@pytest.mark.parametrize("name", sorted(path.stem for path in (PROJECT / "recipes").glob("*.yaml")))
def test_our_own_recipes_have_no_errors(name: str) -> None:
    lines = [str(one) for one in check.own_findings(PROJECT, name)]
    assert not [line for line in lines if line.startswith("error")], lines
    made_here = manifests.model_of(PROJECT, manifests.load_recipe(PROJECT, name)).is_made  # and so locked
    assert made_here or [line for line in lines if "this model has not been locked yet" in line]


def test_all_that_is_wrong_is_told_in_one_go(project: Path) -> None:
    """Of the keys, of what they name, and of the words of the command, though its braces and its JSON are wrong."""
    path = project / "recipes/scripted-tiny.yaml"
    text = before = path.read_text()
    for old, new in (
        ("name: scripted-tiny", "name: other"),
        ("description:", "descripton:"),
        ("stack: cpu", "stak: cpu\nx: 1"),
        ("stage: v2-tq", "stage: v9\nmods: [nope, nada]"),
        ("model_revision: ", "model_revision: a #"),
        ("{port}", "{prot}"),
        ("serve /model", "serve other/model"),
        ("--reasoning-parser qwen3 ", "--reasoning-parser {parser} --dtype {dtype} -cc {{1}} --ssl-keyfile k "),
        ("parser qwen3_coder", "parser qwen3 --kv-cache-dtype turboquant35"),
    ):
        assert old in text, old
        text = text.replace(old, new, 1)
    path.write_text(text)
    lines = [str(one) for one in check.own_findings(project, "scripted-tiny")]
    told = """\
descripton: saw 'scripted Qwen3.5-MoE
stak: saw 'cpu', wanted no such key (known here: command,
x: saw 1, wanted no such key (known here: command,
name: saw 'other', wanted 'scripted-tiny'
command: {dtype} is no key of `defaults`
command: {parser} is no key of `defaults`
command: {prot} is no key of `defaults`
stage: unknown stage 'v9'; choose one of: base,
model_revision: saw 'a', wanted d7b8395b378f
mods: saw 'nope', wanted a chat template of pins/commu
mods: saw 'nada', wanted a chat template of pins/commu
command: saw 'other/model', wanted 'sparkpin/scripted-tiny-int4-AutoRound' (the recipe's model)
command: saw '{1}', wanted JSON
--kv-cache-dtype: saw 'turboquant35', wanted turboquant_4bit_nc
command: saw '--ssl-keyfile', wanted no TLS
command: --tool-call-parser qwen3: vLLM 0.32.0 has no such parser
""".splitlines()
    begins = [*(f"error: {line}" for line in told), "warning: defaults.port: nothing uses it"]
    assert [line[: len(begin)] for line, begin in zip(lines, begins, strict=True)] == begins
    hints = {0: "description", 1: "stack", 6: "port"}
    assert all(lines[at].endswith(f"; did you mean {name}?") for at, name in hints.items())
    path.write_text(
        text.replace("stak: cpu", "stack: cpuu").replace("{prot}", "{port").replace("port: 8000", "port: [1]")
    )
    lines = [str(one) for one in check.own_findings(project, "scripted-tiny")]
    assert "error: defaults.port: saw [1], wanted text, a number, true or false" in lines, "one line, not one a type"
    path.write_text(before.replace("max_model_len: 2048", "max_model_len: -5"))
    (line,) = [str(one) for one in check.own_findings(project, "scripted-tiny") if one.severity == "error"]
    assert line.startswith("error: command: --max-model-len: saw '-5', wanted a positive number")


def test_every_file_of_recipes_is_checked_whatever_the_others_are(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = Paths(project, tmp_path / "cache", tmp_path / "home")
    for name, text in (("a", "- 1\n"), ("b", "a: b: c\n"), ("My_own", "{}\n"), ("c", "stack: 1\n")):
        (project / f"recipes/{name}.yaml").write_text(text)
    assert not tasks.recipe_check(paths, as_json=True)
    told = json.loads(capsys.readouterr().out)
    rows = {Path(row["name"]).stem: row for row in told["recipes"]}
    errors = {name: [one for one in row["found"] if one["severity"] == "error"] for name, row in rows.items()}
    assert {name for name, row in rows.items() if row["verdict"] == "refused"} == {"a", "b", "My_own", "c"}
    assert told["refused"] == 4 == len(rows) - told["passed"]
    assert [one["text"] for one in errors["a"]] == ["saw 'list', wanted a mapping of keys"]
    assert [one["key"] for one in errors["b"]] == ["line 1"] and len(errors["c"]) == 7
    named = next(one for one in errors["My_own"] if one["key"] == "name")
    assert named["hint"] == "rename the file"
    with pytest.raises(InputError, match="My_own"):
        pair(project, "My_own")


def test_a_build_tells_of_what_vllm_will_refuse(project: Path) -> None:
    paths = Paths(project, project.with_name("cache"), project.with_name("home"))
    right = commands_notes.notes_of(paths, pair(project, "scripted-tiny")[-1])
    assert not any(line.startswith("warning") for line in right)
    file = project / "recipes/scripted-tiny.yaml"
    file.write_text(file.read_text().replace("--max-num-seqs", "--max-nums-seqs"))
    (line,) = set(commands_notes.notes_of(paths, pair(project, "scripted-tiny")[-1])) - set(right)
    told = "vLLM 0.32.0 has no flag --max-nums-seqs; did you mean --max-num-seqs?"
    assert line == f"warning: recipes/scripted-tiny.yaml: command: {told}"


def test_which_recipe_is_meant(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = project / "recipes/scripted-tiny.yaml"
    assert check.file_or_name(project, "scripted-tiny") == (own, True)
    assert check.file_or_name(project, str(own)) == (own, True)
    (tmp_path / "mine.yaml").write_text("")
    assert check.file_or_name(project, "mine.yaml") == (Path("mine.yaml"), False)
    with pytest.raises(InputError, match="no recipe 'scripted-tin'"):
        check.file_or_name(project, "scripted-tin")


# The data, from a wheel.

ARGUMENTS = """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        model_kwargs = get_kwargs(ModelConfig)
        eager_kwargs = model_kwargs["eager"]
        parser.add_argument("--model", "-m", **model_kwargs["model"])
        parser.add_argument("--enforce-eager", **eager_kwargs)
        parser.add_argument("--caching", **{**model_kwargs["caching"], "default": None})
        parser.add_argument("--dtype", **model_kwargs["dtype"])
        parser.add_argument("--format", **model_kwargs["format"])
        parser.add_argument("--headless", action="store_true")
        parser.add_argument("--backend", **model_kwargs["backend"])
        parser.add_argument("positional")
"""
MODEL = """
from typing import Literal
Kind = Literal["half", "full"]
class ModelConfig:
    model: str = "x"
    eager: bool = False
    caching: bool | None = None
    dtype: Kind = "half"
    format: "str" | Literal["a", "b"] = "a"
    format: str | Literal["a", "b"] = "a"
    backend: AttentionBackendEnum | None = None
"""


def wheel(folder: Path, **files: str) -> Path:
    path = folder / "vllm-9.9.0-py3-none-any.whl"
    many = "class FrontendArgs:\n" + "".join(f"    extra_{n}: int = 0\n" for n in range(100))
    sources = {
        "vllm-9.9.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0+cu130\n",
        "vllm/engine/arg_utils.py": ARGUMENTS,
        "vllm/config/model.py": MODEL,
        "vllm/entrypoints/openai/cli_args.py": many,
        "vllm/envs.py": 'environment_variables: dict[str, int] = {"VLLM_B": 1, "VLLM_A": 2}\n',
        "vllm/tool_parsers/__init__.py": '_TOOL_PARSERS_TO_REGISTER = {"b": 1, "a": 2}\n',
        "vllm/reasoning/__init__.py": '_REASONING_PARSERS_TO_REGISTER = {"r": 1}\n',
        "vllm/v1/attention/backends/registry.py": "class AttentionBackendEnum(Enum):\n    FLASH = 1\n    ALL = 2\n",
    } | files  # fmt: skip
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in sources.items():
            archive.writestr(name, text)
    return path


def test_flags_of_a_wheel(tmp_path: Path) -> None:
    value = wheelflags.read_wheel(wheel(tmp_path))
    flags = {name: entry for name, entry in value.pop("flags").items() if not name.startswith("--extra-")}
    assert flags == {
        "--backend": {"kind": "value", "values": ["ALL", "FLASH"]},
        "--caching": {"kind": "switch"},
        "--dtype": {"kind": "value", "values": ["full", "half"]},
        "--enforce-eager": {"kind": "switch"},
        "--format": {"kind": "value", "values": ["a", "b"], "open": True},
        "--headless": {"kind": "bare"},
        "--model": {"kind": "value", "also": ["-m"]},
    }
    assert value["version"] == "9.9.0" and value["environment"] == ["VLLM_A", "VLLM_B"]
    assert (value["tool_parsers"], value["reasoning_parsers"]) == (["a", "b"], ["r"])
    assert value["source"]["wheel"] == "vllm-9.9.0-py3-none-any.whl"
    with pytest.raises(ManifestError, match="the sources of vLLM"):
        wheelflags.read_wheel(wheel(tmp_path, **{"vllm/reasoning/__init__.py": ""}))

"""`invoke add` of others' files, and `recipe export`: a recipe becomes ours, and goes back."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_templates import add_template
from foreign_recipe import V1, written
from made_releases import release
from places import PROJECT

from sparkpin.build.pair import pair
from sparkpin.cli import add
from sparkpin.cli import recipe as tasks
from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests, vllm_command, vllm_flags
from sparkpin.pins.nodes import nodes_of
from sparkpin.pins.values import UNSHOWN
from sparkpin.recipes import adopt, check, recipe, render
from sparkpin.releases.record import Releases

CORPUS = PROJECT.parent / "shared/corpus/recipes"
OURS = """vllm serve /model \\
  --port {port} \\
  --host {host} \\
  -tp {tensor_parallel} \\
  --override-generation-config '{{"top_k": 20}}' \\
  --speculative-config '{{"method": "mtp", "num_speculative_tokens": 1}}'
"""


def imported(paths: Paths, folder: Path, value: dict[str, Any], **options: Any) -> Any:
    before = {*(paths.project / "recipes").iterdir()}
    add.add(paths, written(folder, value), no_lock=True, **options)
    (target,) = {*(paths.project / "recipes").iterdir()} - before
    return yaml.safe_load(target.read_text())


def test_a_recipe_of_version_1_becomes_ours(paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = imported(paths, tmp_path, V1)
    assert value == {
        "recipe_version": "1",
        "name": "some-recipe",
        "description": "acme/sample-int4, from Some Recipe.yaml",
        "model": "acme/sample-int4",
        "model_revision": "unresolved",
        "container": "sparkpin/some-recipe",
        "stack": "spark",
        "stage": "base",
        "defaults": {"port": 8001, "host": "127.0.0.1", "tensor_parallel": 1},
        "env": {"VLLM_MARLIN_USE_ATOMIC_ADD": "1", "J": '{"a": 1}'},
        "command": OURS,
    }
    told = capsys.readouterr().out
    named = ("pins/models/sample-int4.yaml", "tensor_parallel 2 -> 1", "--host 0.0.0.0", "not-here", "unsloth.jinja")
    assert all(name in told for name in (*named, "fix-qwen3.5-autoround"))
    assert "not mapped" in (paths.project / "recipes/some-recipe.yaml").read_text()
    loaded = manifests.load_recipe(paths.project, "some-recipe")
    assert vllm_command.own_argv(loaded)[3:5] == ["--port", "8001"]
    assert manifests.load_model(paths.project, "sample-int4").repositories["base"].repo == "acme/sample-int4"


def test_a_mod_that_is_pinned_stays_and_brings_its_template(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = imported(paths, tmp_path, V1 | {"mods": ["mods/fix-qwen3.5-chat-template"]})
    assert made["mods"] == ["fix-qwen3.5-chat-template"]
    assert made["command"] == OURS.rstrip() + " \\\n  --chat-template unsloth.jinja\n"
    told = capsys.readouterr().out
    assert re.search(r"next: curl \S.* pins/chat_templates/fix-qwen3\.5-chat-template\.jinja https://", told)


def test_a_recipe_of_version_2_becomes_ours(paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {
        "model": "acme/sample-int4",
        "model_revision": "f" * 40,
        "runtime": "vllm",
        "container": "vllm/vllm-openai:v0.20.1-aarch64",
        "metadata": {"description": "a sample"},
        "executor_config": {"entrypoint": ""},
        "volumes": ["/a:/b"],
        "defaults": {"port": 1, "spec": '{"model": "x/draft"}', "more": "--max-num-seqs 2"},
        "command": """vllm serve {model} --port {port} {more} \\
            --speculative-config '{spec}' --x '{"a":{"b":{port}}}' | tee l""",
    }  # fmt: skip
    made = imported(paths, tmp_path, value, name="Other")
    assert (made["name"], made["stack"], made["description"]) == ("other", "spark", "a sample")
    plan = '{{"model":"x/draft","method":"draft_model","num_speculative_tokens":3}}'
    flags = [
        "--port {port}",
        "--max-num-seqs {max_num_seqs}",
        f"--speculative-config '{plan}'",
        """--x '{{"a":{{"b":1}}}}'""",
    ]
    assert made["command"] == " \\\n  ".join(["vllm serve /model", *flags]) + "\n"
    assert made["defaults"] == {"port": 1, "max_num_seqs": 2}
    told = [line for line in capsys.readouterr().out.splitlines() if "not mapped: " in line]
    for name in ("volumes", "| tee l"):
        assert [line for line in told if name in line]
    assert made["drafter"] == "x/draft" and manifests.load_model(paths.project, "draft").drafts
    assert made["model_revision"] == "f" * 40


SERVED = "vllm serve acme/sample-int4"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"command": "vllm serve --model b/c --port 1", "model": None}, {"model": "b/c", "command": "--port {port}"}),
        ({"command": f"{SERVED} --revision {'e' * 40} --port 1"}, {"model_revision": "e" * 40}),
        ({"command": f"{SERVED} --port 1 --ssl-keyfile k --ssl-certfile=c"}, {"command": "--port {port}"}),  # no TLS
        ({"command": f"{SERVED} --seed {{s:.2f}}", "defaults": {"s": 0.9}}, {"command": "--seed 0.90"}),
    ],
)
def test_what_becomes_of_a_command(
    paths: Paths, tmp_path: Path, change: dict[str, Any], wanted: dict[str, Any]
) -> None:
    made = imported(paths, tmp_path, {key: part for key, part in (V1 | change).items() if part is not None})
    if "command" in wanted:
        wanted["command"] = f"vllm serve /model \\\n  {wanted['command']}\n"
    assert {key: made.get(key) for key in wanted} == wanted


def test_folders_of_their_containers_and_tokens_are_left_out(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"HF_HOME": "/root/.cache/huggingface", "HF_TOKEN": "hf_secret", "TRITON_CACHE_DIR": "/x", "N": 4}
    with pytest.raises(ManifestError) as caught:
        imported(paths, tmp_path, V1 | {"env": env | {"VLLM_API_KEY": "0123456789abcdef"}})
    assert (caught.value.key, caught.value.got) == ("env.VLLM_API_KEY", UNSHOWN)
    with pytest.raises(ManifestError, match="--api-key"):
        imported(paths, tmp_path, V1 | {"command": "vllm serve acme/sample-int4 --api-key 0123456789abcdef"})
    assert not (paths.project / "recipes/some-recipe.yaml").exists()
    value = imported(paths, tmp_path, V1 | {"env": env})
    assert value["env"] == {"N": "4"}
    told = capsys.readouterr().out
    assert "HF_HOME" in told and "hf_secret" not in told
    file = paths.project / "recipes/some-recipe.yaml"
    file.write_text(file.read_text().replace("  N: ", "  HF_HOME: "))
    assert "env.HF_HOME" in [one.key for one in check.check(paths.project, "some-recipe").found]


def test_the_list_of_recipes_tells_of_those_that_cannot_be_read(
    paths: Paths, capsys: pytest.CaptureFixture[str]
) -> None:
    (paths.project / "recipes/broken.yaml").write_text("name: other\n")
    tasks.recipe_list(paths)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line[:1] == ["broken"]] and [line for line in lines if "v2-tq" in line]


def test_a_model_that_is_pinned_already_is_taken(paths: Paths, tmp_path: Path) -> None:
    locked = manifests.load_recipe(paths.project, "scripted-tiny")
    made = imported(paths, tmp_path, V1 | {"model": locked.model, "command": f"vllm serve {locked.model}"}, stack="cpu")
    assert (made["model_revision"], made["stack"]) == (locked.model_revision, "cpu")
    assert pair(paths.project, "some-recipe")[-1].tag.startswith("sparkpin/some-recipe:base-")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"cluster_only": True, "command": "vllm serve acme/sample-int4 -tp 16"}, "2 to 8 machines"),
        ({"cluster_only": True, "command": "vllm serve acme/sample-int4 -tp 2 -dp 2"}, "1: a recipe for one GPU"),
        ({"command": "sglang serve --model-path x"}, "vllm serve MODEL"),
        ({"command": "vllm serve /models/x", "model": "/models/x"}, "a repository of the Hub, OWNER/NAME"),
        ({"command": "vllm serve acme/sample-int4 --x '{{\"a\"}}'"}, "JSON"),
        ({"command": "vllm serve acme/sample-int4 --port {prot}"}, "{prot}"),
        ({"command": "vllm serve {model} --port {prot}", "recipe_version": "2"}, "{prot}"),
        ({"command": "pip install x"}, "vllm serve MODEL"),
    ],
)
def test_what_cannot_be_taken_over_leaves_nothing(
    paths: Paths, tmp_path: Path, change: dict[str, Any], wanted: str
) -> None:
    before = sorted(paths.project.rglob("*"))
    with pytest.raises((ManifestError, InputError), match=wanted):
        imported(paths, tmp_path, V1 | change)
    assert sorted(paths.project.rglob("*")) == before


def test_nothing_is_overwritten_and_names_must_be_known(paths: Paths, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"scripted-tiny\.yaml is there already"):
        imported(paths, tmp_path, V1, name="Scripted Tiny")
    with pytest.raises(InputError, match="unknown stack"):
        imported(paths, tmp_path, V1, stack="sparc")
    with pytest.raises(InputError, match="unknown stage"):
        imported(paths, tmp_path, V1, stage="v9")
    assert not (paths.project / "recipes/some-recipe.yaml").exists()
    imported(paths, tmp_path, V1)
    imported(paths, tmp_path, V1 | {"command": "vllm serve other/sample-int4"}, name="b")
    assert (paths.project / "pins/models/other-sample-int4.yaml").is_file(), "two repositories of one name"


def test_a_checkpoint_that_is_made_here_is_given_as_a_folder(
    paths: Paths, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    last = pair(paths.project, "scripted-tiny")[-1]
    folder = paths.checkpoints / "scripted-tiny" / last.checkpoint_key[:16]
    for form, model in (("v1", "/model"), ("v2", str(folder))):
        tasks.recipe_export(paths, "scripted-tiny", format=form)
        text, told_beside = capsys.readouterr()
        assert ("listens on all addresses" in told_beside) == (form == "v2")
        (tmp_path / "r.yaml").write_text(text)
        made = render.render(recipe.load(tmp_path / "r.yaml"))
        host = "0.0.0.0" if form == "v2" else "127.0.0.1"  # sparkrun asks the machine's own address whether it is up
        assert made.argv == ("vllm", "serve", model, *vllm_flags.set_flag(last.argv, "--host", host)[3:])
        assert made.env == last.env
        assert f"# Checkpoint: {folder}" in text
    tasks.recipe_export(paths, "scripted-tiny", format="v1")
    told = capsys.readouterr()
    assert f"-v {folder}:/model" in told.out and last.tag in told.err, "it is not built yet"
    Releases(paths).save(release(3, recipe="scripted-tiny", stage=last.stage.name, key=last.key, tag=last.tag))
    tasks.recipe_export(paths, "scripted-tiny", format="v1")
    assert last.tag not in capsys.readouterr().err


@pytest.mark.parametrize("form", ["v1", "v2"])
@pytest.mark.parametrize(
    ("name", "stage"), [("scripted-tiny", None), ("scripted-tiny", "hybrid"), ("scripted-pair", None)]
)
def test_what_was_exported_is_the_same_release_when_it_is_imported(
    paths: Paths, capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str, name: str, stage: str | None
) -> None:
    add_template(paths.project)
    file = paths.project / f"recipes/{name}.yaml"
    more = "--override-generation-config '{{\"top_k\": 20}}'\nmods: [fix-own]\n"
    text = file.read_text().replace(" \\\n    --reasoning-parser qwen3", "")  # which its family adds, after all others
    file.write_text(f"{text.rstrip()} {more}")
    before = pair(paths.project, name, stage=stage)[-1]
    assert before.chosen
    tasks.recipe_export(paths, name, format=form, stage=stage)
    (tmp_path / "r.yaml").write_text(capsys.readouterr().out)
    assert not tasks.recipe_check(paths, [str(tmp_path / "r.yaml")])
    assert f"compared with stack {before.stack.name} (vLLM" in capsys.readouterr().out
    add.add(paths, str(tmp_path / "r.yaml"), name="again")
    told = capsys.readouterr().out
    assert "not mapped" not in told and "next: invoke up --recipe again" in told
    after = pair(paths.project, "again")[-1]
    assert (after.argv, after.env) == (before.argv, before.env)
    assert after.key == before.key, "image, checkpoint and command"
    was, made = before.recipe, after.recipe
    assert (made.model, made.model_revision) == (was.model, was.model_revision)
    assert (made.mods, made.stack, made.stage) == (["fix-own"], was.stack, stage or was.stage)
    assert made.nodes == was.nodes


def test_a_cluster_of_the_community_is_taken_over(paths: Paths, tmp_path: Path) -> None:
    command = "vllm serve {m} -tp {tensor_parallel} --distributed-executor-backend ray --port 1"
    value = V1 | {"cluster_only": True, "command": command, "defaults": {"m": "acme/sample-int4", "tensor_parallel": 4}}
    made = manifests.load_recipe(paths.project, imported(paths, tmp_path, value)["name"])
    assert (made.nodes, made.defaults["tensor_parallel"]) == (4, 4)
    argv = vllm_command.serve_argv(made, manifests.load_stack(paths.project, "spark"), ())[0]
    assert nodes_of(argv) == 4 and vllm_flags.flag_value(argv, "-tp") is None
    assert vllm_flags.flag_value(argv, "--tensor-parallel-size") == "4" and "ray" not in argv


def rows_of(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {row["name"].rpartition("/")[2]: row for row in json.loads(capsys.readouterr().out)["recipes"]}


def test_check_goes_on_after_a_file_that_is_missing(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = written(tmp_path, V1 | {"command": "vllm serve acme/sample-int4 --prot {port}"}, "bad.yaml")
    for words, code in ((["nosuch", "scripted-tiny"], 2), (["nosuch", bad, "scripted-tiny"], tasks.MISTAKES)):
        assert tasks.recipe_check(paths, words, json=True) == code
        rows = rows_of(capsys)
        assert [rows[Path(word).name]["verdict"] for word in words[:-1]] == ["refused"] * (len(words) - 1)
        assert rows["scripted-tiny.yaml"]["verdict"] == "passes"


def test_check_takes_files_folders_and_globs(paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "many/below").mkdir(parents=True)
    for name, change in {
        "good": {"mods": [], "command": "vllm serve acme/sample-int4 --port {port}"},
        "bad": {"command": "vllm serve acme/sample-int4 --prot {port}"},
        "below/cluster": {"cluster_only": True, "command": "vllm serve acme/sample-int4 -tp {tensor_parallel}"},
        "below/\x1b[31m": {"command": ""},
    }.items():
        written(tmp_path / "many", V1 | change, f"{name}.yaml")
    (tmp_path / "many/unread.yml").write_text("a: [")
    (tmp_path / "many/notes.txt").write_text("")
    many = str(tmp_path / "many")
    assert tasks.recipe_check(paths, [many], json=True)
    rows = rows_of(capsys)
    passes = {name: row["verdict"] == "passes" for name, row in rows.items()}
    assert passes == {"good.yaml": True, "bad.yaml": False, "cluster.yaml": True, "unread.yml": False,
                      "\x1b[31m.yaml": False}  # fmt: skip
    assert [rows[name]["machines"] for name in ("good.yaml", "cluster.yaml", "unread.yml")] == [1, 2, "?"]
    about_cluster = [one for one in rows["cluster.yaml"]["found"] if re.search(r"Ray|nodes|execut", one["text"])]
    assert len(about_cluster) == 1
    for name, text in (("a", "- 1\n"), ("b", "a: b: c\n"), ("My_own", "{}\n"), ("c", "stack: 1\n")):
        (paths.project / f"recipes/{name}.yaml").write_text(text)
    assert tasks.recipe_check(paths, json=True)
    ours = rows_of(capsys)
    assert {name for name, row in ours.items() if row["verdict"] == "refused"} == {
        "a.yaml", "b.yaml", "c.yaml", "My_own.yaml",
    }  # fmt: skip
    assert not tasks.recipe_check(
        paths, [f"{many}/good.yaml", f"{many}/below/cluster.yaml", "scripted-tiny"], json=True
    )
    assert set(rows_of(capsys)) == {"good.yaml", "cluster.yaml", "scripted-tiny.yaml"}
    assert tasks.recipe_check(paths, [many])
    assert "\x1b" not in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    for nothing in (f"{many}/x.yaml", str(tmp_path / "empty")):
        with pytest.raises(InputError):
            tasks.recipe_check(paths, [nothing])


def test_check_says_all_that_import_would(paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at, change in enumerate(
        (
            {},  # a mod and a template that are not here
            {"build_args": ["--exp-mxfp4"], "container": "somebody/vllm:1", "env": {"HF_HOME": "/x", "N": "${HOME}"}},
            {"command": "pip install x\nvllm serve acme/sample-int4 --ssl-keyfile k | tee l"},
        )
    ):
        file = written(tmp_path, V1 | change, f"{at}.yaml")
        tasks.recipe_check(paths, [file])
        checked = capsys.readouterr().out
        add.add(paths, file, no_lock=True)
        told = capsys.readouterr().out.splitlines()
        said = [line.strip() for line in told if re.match("  (not mapped: |.* -> )", line)]
        once = [line for line in said if not line.startswith("not mapped: --chat-template")]  # that is an error already
        assert once and all(f"add: {line}" in checked for line in once)
        assert re.search(r"next: (correct|invoke add) \S", checked.splitlines()[-1])


def test_an_import_can_be_tried_and_one_with_errors_ends_as_such(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, V1 | {"mods": [], "defaults": V1["defaults"] | {"unused": 2}})
    before = sorted(paths.project.rglob("*"))
    assert add.add(paths, file, no_lock=True, dry_run=True) == 0
    tried = capsys.readouterr().out
    assert sorted(paths.project.rglob("*")) == before
    assert add.add(paths, file, no_lock=True) == 0
    done = capsys.readouterr().out
    text = (paths.project / "recipes/some-recipe.yaml").read_text()
    # What was not mapped stands in the file, which a dry run shows.
    lines = [line for line in done.replace("wrote", "would write").splitlines() if "not mapped: " not in line]
    assert tried.removeprefix(f"{text}\n").splitlines()[:-1] == lines[:-1], "all but the next step"
    with pytest.raises(InputError, match=f"{paths.project}/recipes/some-recipe.yaml is there already"):
        add.add(paths, file, no_lock=True, dry_run=True)
    bad = written(tmp_path, V1 | {"command": "vllm serve acme/sample-int4 --prot 1"}, "bad.yaml")
    for dry_run in (True, False):
        assert add.add(paths, bad, no_lock=True, dry_run=dry_run) == tasks.MISTAKES
        assert "has no flag --prot" in capsys.readouterr().out
    assert (paths.project / "recipes/bad.yaml").is_file()


def shown(paths: Paths, what: str, capsys: pytest.CaptureFixture[str], **more: Any) -> tuple[dict[str, str], list[str]]:
    tasks.recipe_show(paths, what, json=True, **more)
    value = json.loads(capsys.readouterr().out)
    rows = [*value["command"], *value["environment"]]
    return {re.split("[ =]", row["text"])[0]: row["from"] for row in rows}, value["notes"]


def test_show_says_where_each_word_is_from(paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_template(paths.project)
    value = V1 | {"model": "Qwen/Qwen3.5-1B", "mods": ["fix-own"], "container": "sparkpin/stack-spark:v2-0123456789ab"}
    command = "vllm serve Qwen/Qwen3.5-1B --port {port} --tool-call-parser hermes --speculative-config '{{}}'"
    file = written(tmp_path, value | {"command": command})
    before = sorted(paths.project.rglob("*"))
    found, notes = shown(paths, file, capsys)
    assert sorted(paths.project.rglob("*")) == before, "nothing is written, and nothing need be locked"
    assert found["vllm"] == found["HF_HUB_OFFLINE"] == found["--served-model-name"] == "launcher"
    assert found["--port"] == found["--tool-call-parser"] == found["VLLM_MARLIN_USE_ATOMIC_ADD"] == "recipe"
    assert found["--reasoning-parser"] == found["--chat-template-content-format"] == "family qwen3.5"
    assert found["--speculative-config"].startswith("stage ")
    assert [note for note in notes if "--chat-template-content-format openai" in note]


def test_show_of_our_own_is_what_a_build_would_serve(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    for name, stage in (("scripted-tiny", "v2"), ("scripted-pair", None)):
        last = pair(paths.project, name, stage=stage)[-1]
        tasks.recipe_show(paths, name, stage=stage, json=True)
        value = json.loads(capsys.readouterr().out)
        assert shlex.split(" ".join(row["text"] for row in value["command"])) == list(last.argv)
        assert {f"{key}={text}" for key, text in last.env.items()} <= {row["text"] for row in value["environment"]}
    found, _ = shown(paths, "scripted-pair", capsys)
    assert found["--nnodes"] == "launcher" and "stack cpu" in found.values()
    tasks.recipe_show(paths, "qwen3.5-122b")
    assert "family qwen3.5" in capsys.readouterr().out, "whose model is not locked"


def test_a_recipe_of_ours_from_elsewhere_is_held_against_its_own_stack(
    paths: Paths, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    away = tmp_path / "away.yaml"
    away.write_text((paths.project / "recipes/scripted-tiny.yaml").read_text())
    assert not tasks.recipe_check(paths, [str(away)])
    told = capsys.readouterr().out
    assert "compared with stack cpu (vLLM" in told and "does not know this key" not in told
    add.add(paths, str(away), name="again")
    assert pair(paths.project, "again")[-1].key == pair(paths.project, "scripted-tiny")[-1].key
    away.write_text(away.read_text().replace("stage: v2-tq\n", ""))
    assert [one.key for one in check.check(paths.project, str(away)).errors] == ["stage"]


def test_exports_that_cannot_be(paths: Paths) -> None:
    own = paths.project / "recipes/scripted-tiny.yaml"
    before = own.read_bytes()
    for name, form, output in (
        ("qwen3.5-122b", "v1", ""), ("qwen", "v1", ""), ("scripted-tiny", "v1", str(own)),
        ("scripted-drafted", "v1", ""), ("scripted-drafted", "v2", ""),
    ):  # fmt: skip
        with pytest.raises((InputError, ManifestError)):
            tasks.recipe_export(paths, name, format=form, output=output)
    assert own.read_bytes() == before


def test_a_mod_is_a_template_or_needless_or_refused(project: Path, tmp_path: Path) -> None:
    add_template(project)
    argv = ["vllm", "serve", "a/b", "--chat-template", "fix-own.jinja"]
    assert "--chat-template" in adopt.leave_out(adopt.Adopted(mods=["fix-own"]), project, argv)
    assert "--chat-template" not in adopt.leave_out(adopt.Adopted(mods=["fix-other"]), project, argv)
    mods = ["mods/fix-own", "drop-caches/", "mods/Fix-Qwen3.5-autoround.zip", "mods/gpu-mem-util-gb", "mods/gone"]
    read = recipe.load(Path(written(tmp_path, V1 | {"mods": mods})))
    for version, needless in (("0.33.0", ["drop-caches", "fix-qwen3.5-autoround"]), ("0.18.0", ["drop-caches"])):
        made = adopt.Adopted()
        adopt.take_mods(made, read, project, version)
        refused = [line for line in made.unmapped if line.startswith("mod ")]
        assert made.mods == ["fix-own"]
        assert [mod for mod in needless if any(f"mod {mod} -> nothing" in line for line in made.notes)] == needless
        assert len(made.mods) + len(needless) + len(refused) == len(mods)
    assert any("--gpu-memory-utilization" in line for line in refused), "its counterpart"


OWN = "sparkpin/scripted-drafter"


@pytest.mark.parametrize(
    ("words", "made", "drafter"),
    [
        ("--spec-method mtp --spec-tokens {n}", '{{"method":"mtp","num_speculative_tokens":3}}', None),
        (
            f"--spec_model={OWN} --spec-tokens 2",
            f'{{{{"model":"{OWN}","num_speculative_tokens":2,"method":"draft_model"}}}}',
            OWN,
        ),
        (
            "--spec-model x/draft --spec-method eagle3 --spec-tokens {n}",
            '{{"model":"x/draft","method":"eagle3","num_speculative_tokens":3}}',
            "x/draft",
        ),
    ],
)
def test_drafts_that_are_set_by_flags_of_their_own_come_to_one_plan(
    paths: Paths, tmp_path: Path, words: str, made: str, drafter: str | None
) -> None:
    command = f"vllm serve acme/sample-int4 --port {{port}} {words}"
    value = imported(paths, tmp_path, V1 | {"mods": [], "command": command, "defaults": {"port": 8001, "n": 3}})
    plan = f"--speculative-config '{made}'"
    assert value["command"] == " \\\n  ".join(["vllm serve /model", "--port {port}", plan]) + "\n"
    assert value.get("drafter") == drafter and value["defaults"] == {"port": 8001}


if CORPUS.is_dir():  # a clone alone has none of them

    @pytest.mark.parametrize("path", sorted(CORPUS.glob("*.yaml")), ids=lambda path: path.stem[-50:])
    def test_the_corpus_is_taken_over_or_told_why_not(paths: Paths, path: Path) -> None:
        refused = {
            "minimax-m3-minimax": "SGLang", "opus": "expected JSON", "embed": "/v1/embeddings",
            "recipes-laguna-s-2.1": "--drafter hf:",  # its drafter is a folder
        }  # fmt: skip
        why = next((text for part, text in refused.items() if part in path.name), None)
        if why:
            with pytest.raises((ManifestError, InputError), match=why):
                add.add(paths, str(path), no_lock=True)
            return
        add.add(paths, str(path), no_lock=True)
        loaded = manifests.load_recipe(paths.project, adopt.plain_name(path.stem))
        before = render.render(recipe.load(path), single=loaded.nodes == 1)
        assert loaded.nodes == render.machines_of(recipe.load(path))
        made = vllm_command.own_argv(loaded)
        dropped = ("--chat-template", "--speculative-config", "--distributed-executor-backend")
        expected = vllm_flags.drop_flags(vllm_flags.set_flag(before.argv, "--host", "127.0.0.1"), *dropped)
        assert vllm_flags.drop_flags(made, *dropped)[3:] == expected[3:]
        assert loaded.env == {name: text for name, text in before.env.items() if name != "HF_HOME"}
        assert loaded.model in ("poolside/Laguna-S-2.1-NVFP4", before.argv[2])

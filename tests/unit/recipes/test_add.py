"""`invoke add` against a Hub on 127.0.0.1, which has public models with their true shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub
import pytest
import yaml
from foreign_recipe import V1, written
from places import PROJECT
from public_models import CONFIGS, SHAPED, TEN, write_model

from sparkpin.build.pair import pair
from sparkpin.cli import up
from sparkpin.cli.add import add
from sparkpin.cli.recipe import MISTAKES
from sparkpin.cli.up import recipe_of
from sparkpin.core.errors import InputError, ManifestError, NetworkError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.fetch import transfer
from sparkpin.memory import inputs
from sparkpin.memory.plan import SPARK_TOTAL
from sparkpin.pins import drafters, manifests
from sparkpin.pins.schema import Recipe
from sparkpin.pins.vllm_command import family_of, own_argv
from sparkpin.pins.vllm_flags import flag_value
from sparkpin.recipes import add as adding
from sparkpin.recipes import check
from sparkpin.recipes.adopt import adopt
from sparkpin.recipes.sizes import LENGTH, MOST, SEQUENCES, SHARE

CASES = PROJECT.parent / "shared/cases/models"
QWEN, DRAFTER = "nvidia/Qwen3.8-27B-NVFP4", "z-lab/Qwen3.8-27B-DFlash2"
FAMILIES = {
    "Qwen/Qwen3-8B": "qwen3", "meta-llama/Llama-3.1-8B-Instruct": "llama-3", "openai/gpt-oss-120b": "gpt-oss",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "mistral", "Qwen/Qwen3.8-Flash-Next": "qwen3.5",
    "zai-org/GLM-5.3-Flash": "glm-5", "deepseek-ai/DeepSeek-V4.1-Flash": "deepseek-v4.1",
    "google/gemma-4-E4B-it": "gemma-4", "MiniMaxAI/MiniMax-M3": "minimax-m3", "unsloth/Qwen3.8-27B-NVFP4": "qwen3.5",
}  # fmt: skip
PLAIN = {"Qwen/Qwen3-8B": 40960, "meta-llama/Llama-3.1-8B-Instruct": 131072}  # attention that every plan knows


class Site:
    """Of a test: the project's copy without pins of the models that it adds, and a folder whose repositories a Hub
    serves while `add` runs."""

    def __init__(self, paths: Paths, root: Path) -> None:
        self.paths, self.root = paths, root
        added = {*CONFIGS, *SHAPED}
        for pin in manifests.readable_models(paths.project)[0]:
            if pin.repositories[pin.base].repo in added:
                (paths.project / f"pins/models/{pin.name}.yaml").unlink()
        for file in (paths.project / "recipes").glob("*.yaml"):
            if manifests.load_recipe(paths.project, file.stem).model in added:
                file.unlink()

    def add(self, what: str, *models: str, faults: Any = None, **options: Any) -> int:
        for repo in models:
            if not (self.root / repo).exists():
                write_model(self.root, repo)
        with pytest.MonkeyPatch.context() as patch, hub.serve(self.root, faults=faults) as url:
            patch.setattr(transfer, "TRIES", 1)
            hub.use(patch, url)
            return add(self.paths, what, **options)

    def recipe(self, name: str) -> Recipe:
        return manifests.load_recipe(self.paths.project, name)

    @property
    def files(self) -> dict[str, bytes]:
        places = (self.paths.project / place for place in ("pins", "recipes"))
        return {str(file): file.read_bytes() for place in places for file in place.rglob("*") if file.is_file()}

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.files
        yield
        assert self.files == before


@pytest.fixture
def site(paths: Paths, tmp_path: Path) -> Site:
    (tmp_path / "hub").mkdir()
    return Site(paths, tmp_path / "hub")


Told = pytest.CaptureFixture[str]


def flag(recipe: Recipe, name: str) -> str | None:
    return flag_value(own_argv(recipe), name)


def family(site: Site, recipe: Recipe) -> str | None:
    found = family_of(manifests.load_families(site.paths.project), recipe.model, recipe.family)
    return found and found.name


@pytest.mark.parametrize("repo", TEN)
def test_a_public_model_becomes_a_recipe_with_pin_and_lock(site: Site, repo: str) -> None:
    before = site.files
    result = site.add(f"hf:{repo}", repo, name="mine")
    new = sorted(Path(file).suffix for file in site.files.keys() - before.keys())
    assert new == [".lock", ".yaml", ".yaml"]
    recipe = site.recipe("mine")
    stack, chain = (
        manifests.load_stack(site.paths.project, recipe.stack),
        manifests.load_chain(site.paths.project, "base"),
    )
    assert recipe.family is None and family(site, recipe) == FAMILIES[repo], "its name tells it"
    assert manifests.load_model_lock(site.paths.project, manifests.model_of(site.paths.project, recipe))
    length, share = flag(recipe, LENGTH), flag(recipe, SHARE)
    assert share and (float(share) <= MOST if length else float(share) == MOST), "never vLLM's own, which is more"
    assert bool(result) == bool(check.check(site.paths.project, "mine").errors)
    if repo in PLAIN:
        assert length == str(PLAIN[repo]) and 4 <= int(flag(recipe, SEQUENCES) or 0) <= 16
        assert inputs.read_inputs(site.paths, recipe, stack, chain).plan(inputs.machine_for(stack)).fits


def test_without_a_hub_the_share_of_the_memory_is_set(site: Site) -> None:
    assert not site.add("hf:Qwen/Qwen3-8B", no_lock=True)
    assert flag(site.recipe("qwen3-8b"), SHARE) == str(MOST)
    with site.unchanged(), pytest.raises(InputError) as caught:
        site.add("hf:Qwen/Qwen3-8B", no_lock=True)
    assert "--replace" in caught.value.next_step
    assert not site.add("hf:Qwen/Qwen3-8B", no_lock=True, replace=True)


@pytest.mark.parametrize("command", ["vllm serve {model} --gpu-memory-utilization 0.7", None])
def test_the_share_that_a_file_brings_is_explained(site: Site, capsys: Told, tmp_path: Path, command: str) -> None:
    value = {"recipe_version": "2", "model": "Qwen/Qwen3-8B", "container": "vllm-node", "runtime": "vllm"}
    file = written(tmp_path, value | ({"command": command} if command else {}))
    assert not site.add(file, "Qwen/Qwen3-8B", name="mine")
    share = flag(site.recipe("mine"), SHARE)
    assert share == ("0.7" if command else "0.8")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {SHARE} {share}: ")]
    assert str(PLAIN["Qwen/Qwen3-8B"]) in line, "the context of the plan"


def test_nothing_is_fetched_to_explain_a_share(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a model that is locked: one from a GGUF file, and one whose headers are gone."""
    assert not site.add("hf:Qwen/Qwen3-8B", "Qwen/Qwen3-8B", name="first")
    shutil.rmtree(site.paths.store)
    gguf = manifests.load_recipe(site.paths.project, "smollm2").model

    def ask_nobody(*_: Any, **__: Any) -> Any:
        raise NetworkError("offline")

    for name in ("fetch", "fetch_files"):
        monkeypatch.setattr(transfer, name, ask_nobody)
    for number, model in enumerate((gguf, "Qwen/Qwen3-8B")):
        (tmp_path / "line.sh").write_text(f"vllm serve {model} {SHARE} 0.7\n")
        assert not add(site.paths, str(tmp_path / "line.sh"), name=f"n{number}")
        assert flag(site.recipe(f"n{number}"), SHARE) == "0.7"


@pytest.mark.parametrize(("share", "in_file"), [("{gpu_memory_utilization}", False), ("0.80", True)])
def test_a_share_is_the_files_only_where_its_flag_is(
    site: Site, capsys: Told, tmp_path: Path, share: str, in_file: bool
) -> None:
    command = f"vllm serve {{model}} --served-model-name m-0.8 {SHARE} {share}"
    value = {"recipe_version": "2", "model": "Qwen/Qwen3-8B", "container": "vllm-node", "runtime": "vllm"}
    assert not site.add(written(tmp_path, value | {"command": command}, "theirs.yaml"), no_lock=True, name="mine")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {SHARE} ")]
    assert ("theirs.yaml" in line) == in_file


def test_a_model_that_does_not_fit_is_refused(site: Site) -> None:
    write_model(site.root, "acme/Huge", CONFIGS["Qwen/Qwen3-8B"] | {"intermediate_size": 1_000_000})
    with site.unchanged(), pytest.raises(InputError) as caught:
        site.add("hf:acme/Huge")
    assert caught.value.next_step


def test_sizes_do_not_depend_on_what_the_machine_serves_today(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    host, made = inputs.host.read_host(), []
    for number, free in enumerate((SPARK_TOTAL, SPARK_TOTAL // 10)):
        spark = dataclasses.replace(host, arch="aarch64", memory_total=SPARK_TOTAL, memory_available=free)
        monkeypatch.setattr(inputs.host, "read_host", lambda spark=spark: spark)
        site.add("hf:Qwen/Qwen3-8B", "Qwen/Qwen3-8B", name=f"n{number}")
        made.append(site.recipe(f"n{number}").defaults)
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "options",
    [
        {"name": "x" * 300}, {"nodes": 0}, {"nodes": -1}, {"model": "Qwen/Qwen3-8B"}, {"drafter": f"hf:{QWEN}"},
        {"what": f"hf:{QWEN}@main", "no_lock": True}, {"drafter": f"hf:{DRAFTER}@main", "no_lock": True},
        {"what": "line.sh", "no_lock": True},
    ],
    ids=lambda options: str(options)[:40],
)  # fmt: skip
def test_a_line_that_cannot_be_meant_so(site: Site, options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "line.sh").write_text(f"vllm serve {QWEN} --revision main\n")
    given = {"what": f"hf:{QWEN}", **options}
    what = str(tmp_path / "line.sh") if given["what"] == "line.sh" else given["what"]
    with site.unchanged(), pytest.raises(InputError):
        site.add(**given | {"what": what})


@pytest.mark.parametrize("architecture", ["InternVLChatModel", "UltravoxModel", "QWenLMHeadModel", "NewForCausalLM"])
def test_what_writes_text_or_is_not_known_is_added(site: Site, architecture: str) -> None:
    write_model(site.root, "acme/Chat", CONFIGS["Qwen/Qwen3-8B"] | {"architectures": [architecture]})
    site.add("hf:acme/Chat")
    assert site.recipe("chat").model == "acme/Chat"


def test_no_line_names_the_trial_project(site: Site, monkeypatch: pytest.MonkeyPatch, capsys: Told) -> None:
    def cannot_tell(trial: Paths, *_: Any) -> Any:
        raise ManifestError(trial.project / "x.yaml", "key", 1, "2")

    monkeypatch.setattr(adding, "fit", cannot_tell)
    site.add("hf:Qwen/Qwen3-8B", "Qwen/Qwen3-8B")
    told = capsys.readouterr().out
    assert str(site.paths.project / "x.yaml") in told and str(site.paths.work) not in told


def test_a_recipe_that_appears_meanwhile_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    file = site.paths.project / "recipes/mine.yaml"

    def adopt_slowly(*arguments: Any) -> Any:
        file.write_text("of another run")
        return adopt(*arguments)

    monkeypatch.setattr(adding, "adopt", adopt_slowly)
    with pytest.raises(InputError):
        site.add("hf:Qwen/Qwen3-8B", "Qwen/Qwen3-8B", name="mine")
    assert file.read_text() == "of another run"


def test_a_quantisation_with_a_name_of_its_own_has_the_parsers_of_its_architecture(site: Site) -> None:
    write_model(site.root, "someone/Foo-NVFP4", shaped="nvidia/Qwen3.6-27B-NVFP4")
    assert not site.add("hf:someone/Foo-NVFP4")
    assert site.recipe("foo-nvfp4").family == "qwen3.5"
    argv = pair(site.paths.project, "foo-nvfp4")[-1].argv
    assert flag_value(argv, "--tool-call-parser") == "qwen3_coder", "in the release, too"
    assert "no family" not in str(check.check(site.paths.project, "foo-nvfp4").found)
    file = site.paths.project / "recipes/foo-nvfp4.yaml"
    file.write_text(file.read_text().replace("family: qwen3.5", "family: qwen35"))
    with pytest.raises(ManifestError, match=r"family: got 'qwen35'"):
        site.recipe("foo-nvfp4")


def test_an_architecture_of_several_families_sets_no_parser(site: Site) -> None:
    write_model(site.root, "someone/Bar", CONFIGS["Qwen/Qwen3-8B"])
    assert not site.add("hf:someone/Bar")
    assert family(site, site.recipe("bar")) is None and not flag(site.recipe("bar"), "--tool-call-parser")


def test_what_cannot_be_served_leaves_nothing(site: Site) -> None:
    made = {
        "acme/Score": ["BertForSequenceClassification"], "acme/MTP": ["Qwen3NextMTP"], "acme/Odd": 5,
        "acme/Odder": [{}], "acme/Draft": ["EagleLlamaForCausalLM"], "acme/Vectors": ["Qwen3ForCausalLM"],
    }  # fmt: skip
    for name, architectures in made.items():
        config = CONFIGS["Qwen/Qwen3-8B"]
        write_model(site.root, name, config)
        (site.root / name / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
    (site.root / "acme/Vectors/modules.json").write_text("{}")
    (site.root / "acme/Old-GGUF").mkdir()
    (site.root / "acme/Old-GGUF/m.gguf").write_text("{}")
    with site.unchanged():
        for what, kind in (
            ("hf:acme/Old-GGUF", InputError), ("hf:acme/Score", InputError), ("hf:acme/MTP", InputError),
            ("hf:acme/Draft", InputError), ("hf:acme/Vectors", InputError), ("hf:acme/Odd", ManifestError),
            ("hf:acme/Odder", ManifestError), ("hf:acme/Nothing", NetworkError), (f"hf:{QWEN}@v9", NetworkError),
            ("hf:acme", InputError), (f"hf:{DRAFTER}", InputError), ("hf:Qwen/Qwen3-Embedding-8B", ManifestError),
        ):  # fmt: skip
            with pytest.raises(kind):
                site.add(what, QWEN, DRAFTER)
        assert not site.add(f"hf:{QWEN}", dry_run=True)


def test_a_failure_half_way_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is pinned and locked by then; its drafter is not there."""
    with site.unchanged(), pytest.raises(NetworkError):
        site.add(f"hf:{QWEN}", QWEN, drafter="hf:acme/Nothing")
    with site.unchanged(), pytest.raises(SparkpinError) as caught:  # a damaged header
        write_model(site.root, "acme/Damaged", CONFIGS["Qwen/Qwen3-8B"])
        (site.root / "acme/Damaged/model.safetensors").write_bytes(b"\xff" * 20)
        site.add("hf:acme/Damaged")
    assert str(site.paths.work) not in str(caught.value), "the trial project is no place to look at"


def test_terms_and_code_of_a_repository_are_told(site: Site, capsys: Told, caplog: pytest.LogCaptureFixture) -> None:
    write_model(site.root, "acme/gated", CONFIGS["Qwen/Qwen3-8B"] | {"auto_map": {"AutoModel": "x.Y"}})
    assert not site.add("hf:acme/gated")
    assert "auto_map" in capsys.readouterr().out, "told, and not run"
    assert "--trust-remote-code" not in site.recipe("gated").command
    assert "gated" in caplog.text


def test_a_gated_repository_says_whose_token_opens_it(site: Site) -> None:
    gate = hub.Fault(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
    with site.unchanged(), pytest.raises(NetworkError) as caught:
        site.add(f"hf:{QWEN}", QWEN, faults=lambda request: gate if "/resolve/" in request.path else None)
    assert "HF_TOKEN" in caught.value.next_step


def test_a_revision_is_pinned(site: Site) -> None:
    write_model(site.root, QWEN)
    commit = hub.scan(site.root / QWEN, QWEN).commit
    assert not site.add(f"hf:{QWEN}@{commit}", name="mine")
    assert site.recipe("mine").model_revision == commit
    assert manifests.model_of(site.paths.project, site.recipe("mine")).repositories["base"].revision == commit
    with site.unchanged():
        assert recipe_of(site.paths, f"hf:{QWEN}@{commit}", "mine", None, dry_run=False) == "mine"
        with pytest.raises(InputError):
            recipe_of(site.paths, f"hf:{QWEN}@{'0' * 40}", "mine", None, dry_run=False)
        with pytest.raises(InputError):
            site.add(f"hf:{QWEN}@{'0' * 40}", name="other")


def test_a_drafter_that_is_named_is_pinned_with_its_method_and_block(site: Site) -> None:
    assert not site.add(f"hf:{QWEN}", QWEN, DRAFTER, drafter=f"hf:{DRAFTER}", name="mine")
    recipe = site.recipe("mine")
    drafts = manifests.model_of(site.paths.project, recipe).drafter
    assert drafts and drafts.drafts and (drafts.drafts.method, drafts.drafts.tokens) == ("dflash", 7)
    plan = drafters.speculation(own_argv(recipe))
    assert (plan["model"], plan["method"], plan["num_speculative_tokens"]) == (drafters.PATH, "dflash", 7)
    file = site.paths.project / "recipes/mine.yaml"
    for tokens, wrong in (("7", 0), ("8", 1)):
        text = file.read_text().replace('"num_speculative_tokens":7', f'"num_speculative_tokens":{tokens}')
        file.write_text(text)
        assert len(check.check(site.paths.project, "mine").errors) == wrong


def test_a_drafter_that_is_pinned_as_a_plain_model_gets_its_method_there(site: Site) -> None:
    file = site.paths.project / "pins/models/plain.yaml"
    pin = {"description": "", "base": "it", "repositories": {"it": {"repo": DRAFTER, "revision": "unresolved"}}}
    file.write_text(before := f"# of a person\n{yaml.safe_dump(pin)}")
    with site.unchanged():
        assert not site.add(f"hf:{QWEN}", QWEN, DRAFTER, drafter=f"hf:{DRAFTER}", name="mine", dry_run=True)
    assert not site.add(f"hf:{QWEN}", drafter=f"hf:{DRAFTER}", name="mine")
    drafts = manifests.load_model(site.paths.project, "plain").drafts
    assert drafts and (drafts.method, drafts.tokens) == ("dflash", 7)
    assert file.read_text().startswith(before), "what the person wrote stays"


def test_up_adds_a_model_once(site: Site) -> None:
    with pytest.MonkeyPatch.context() as patch, hub.serve(site.root) as url:
        hub.use(patch, url)
        with pytest.raises(NetworkError):
            recipe_of(site.paths, f"hf:{QWEN}", None, None, dry_run=False)
    site.add(f"hf:{QWEN}", QWEN)
    with site.unchanged():  # no Hub is asked
        assert recipe_of(site.paths, f"hf:{QWEN}", None, None, dry_run=False) == "qwen3.8-27b-nvfp4"
        with pytest.raises(InputError):
            recipe_of(site.paths, "hf:other/Qwen3.8-27B-NVFP4", None, None, dry_run=False)


def test_up_stops_where_add_finds_errors(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "add", lambda *_, **__: MISTAKES)
    with pytest.raises(ManifestError):
        recipe_of(site.paths, f"hf:{QWEN}", None, None, dry_run=False)


def test_a_project_without_recipes_and_models(site: Site) -> None:
    for place in ("recipes", "pins/models"):
        shutil.rmtree(site.paths.project / place)
    assert not site.add("hf:Qwen/Qwen3-8B", no_lock=True)
    assert site.recipe("qwen3-8b").model == "Qwen/Qwen3-8B"


def test_for_several_machines(site: Site) -> None:
    assert not site.add("hf:Qwen/Qwen3-8B", "Qwen/Qwen3-8B", nodes=2)
    assert site.recipe("qwen3-8b").nodes == 2


def test_check_finds_what_the_first_stage_gets_and_a_later_one_replaces(paths: Paths) -> None:
    file = paths.project / "recipes/scripted-tiny.yaml"
    assert not check.check(paths.project, "scripted-tiny").errors
    file.write_text(file.read_text().rstrip() + " \\\n    --kv-cache-dtype no-such-type\n")  # stage v2-tq has its own
    (error,) = check.check(paths.project, "scripted-tiny").errors
    assert "stage base" in error.text and "no-such-type" in error.text


if CASES.is_dir():  # a clone alone has none of them

    def test_case_3_pins_the_drafter_and_refuses_more_drafts_than_its_block_has(site: Site) -> None:
        file = str(CASES / "03-qwen3.8-27b-dflash2/recipe.yaml")
        assert site.add(file, QWEN, DRAFTER, name="mine") == MISTAKES
        recipe = site.recipe("mine")
        assert recipe.drafter == DRAFTER and "--speculative-config" in recipe.command
        assert (site.paths.project / "pins/models/qwen3.8-27b-dflash2.lock").is_file()

    def test_case_6_tells_each_fault_once(paths: Paths) -> None:
        found = check.check(paths.project, str(CASES / "06-flash-next-table-on-disk/recipe.yaml")).found
        for word in ("VLLM_PLE_MMAP_WORKERS", "pull_image"):
            assert len([one for one in found if word in f"{one.key} {one.text}"]) <= 1, word
        assert len({str(one) for one in found}) == len(found)

    def test_case_4_has_no_error_of_b12x_where_the_stack_has_it(paths: Paths) -> None:
        file, lock = str(CASES / "04-glm-5.3-flash-b12x/recipe.yaml"), paths.project / "pins/stacks/spark.lock"
        found = check.check(paths.project, file).found
        assert "b12x" not in str([one for one in found if one.severity == "error"])
        assert "no family" not in str(found)
        value = json.loads(lock.read_text())
        lock.write_text(json.dumps(value | {"wheels": [one for one in value["wheels"] if one["name"] != "b12x"]}))
        assert "the stack's lock has no b12x" in str(check.check(paths.project, file).errors)

    @pytest.mark.parametrize(
        ("name", "options", "expected"),
        [
            ("01-qwen3.8-27b-docker-run/run.sh", {}, "qwen3.5"),
            ("02-coder-next-docker-run/run.sh", {"model": "Qwen/Qwen3-Coder-Next-FP8"}, "qwen3-coder"),
            ("10-ordinary-model/recipe.yaml", {}, "qwen3"),
        ],
    )
    def test_cases_that_are_added_as_they_are(site: Site, name: str, options: dict[str, str], expected: str) -> None:
        assert not add(site.paths, str(CASES / name), name="mine", no_lock=True, **options)  # type: ignore[arg-type]
        assert family(site, site.recipe("mine")) == expected
        assert list((site.paths.project / "pins/models").glob("qwen3*.yaml"))


def test_two_drafters_in_one_command_are_refused(site: Site, tmp_path: Path) -> None:
    twice = "".join(f' --speculative-config \'{{{{"model": "x/{one}", "method": "eagle3"}}}}\'' for one in "ab")
    file = written(tmp_path, V1 | {"command": f"vllm serve acme/sample-int4{twice}"})
    with site.unchanged(), pytest.raises(ManifestError, match="speculative-config"):
        site.add(str(file), no_lock=True)


@pytest.mark.parametrize("word", ["Qwen/Qwen3-8B", "https://huggingface.co/Qwen/Qwen3-8B"])
def test_a_name_without_its_prefix_is_told_with_it(site: Site, word: str) -> None:
    with pytest.raises(InputError) as caught:
        site.add(word)
    assert "hf:Qwen/Qwen3-8B" in caught.value.next_step

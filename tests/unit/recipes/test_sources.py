"""Servers that no recipe starts: `vllm serve`, `docker run`, Compose, scripts; and small inputs that once failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from places import PROJECT

from sparkpin.cli import add
from sparkpin.cli import recipe as tasks
from sparkpin.core.errors import InputError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.fetch import transfer
from sparkpin.pins import manifests
from sparkpin.pins.vllm_flags import parse_flags
from sparkpin.recipes import check, recipe, render
from sparkpin.recipes.vllm_parser import Refused, parser_of

CASES = PROJECT.parent / "shared/cases"
SERVED = ("vllm", "serve", "a/b", "--port", "1")
DOCKER = """docker run -d --gpus all -p 8000:8000 -e A=1 --env B -eC=3 --env=D vllm/vllm-openai:v0.30.0 \\
  --model a/b \\
  --port 1
"""


def read(folder: Path, text: str) -> recipe.CommunityRecipe:
    (folder / "r.yaml").write_text(text)
    return recipe.load(folder / "r.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve a/b --port 1\n",
        "FOO=1 vllm serve a/b \\\n  --port 1",
        "#!/bin/bash\nset -e\nM=a/b\nexport P=1\ncd /x\nexec vllm serve $M --port ${P}\n",
        "vllm serve --port 1 --model=a/b",
        "numactl --cpunodebind=0 /opt/env/bin/vllm serve a/b --port 1",
        "python3 -m vllm.entrypoints.openai.api_server --model a/b --port 1",
        DOCKER,
        "docker run image:1 vllm serve a/b --port 1",
        "sudo podman run --rm --entrypoint python3 x -m vllm.entrypoints.openai.api_server --model a/b --port 1",
        "docker run -v $(pwd):/x -v $HOME:/h x bash -c 'pip install y && exec vllm serve a/b --port 1'",
        "services: {v: {image: vllm/vllm-openai, command: a/b --port 1}, web: {image: nginx}}",
        "services: {v: {image: x/vllm, command: [vllm, serve, '${M:-a/b}', --port, 1]}}",
        "services: {v: {image: x/vllm, entrypoint: [vllm, serve], command: a/b --port 1}}",
    ],
)
def test_each_form_comes_to_the_same_words(tmp_path: Path, text: str) -> None:
    if not text.startswith("services"):
        text = f"# a comment\n{text}"
    assert render.render(read(tmp_path, text)).argv == SERVED


def test_variables_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"B": "from here", "HF_TOKEN": "hf_secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("D", raising=False)
    made = read(tmp_path, DOCKER)
    assert dict(made.env) == {"A": "1", "B": "from here", "C": "3"} and made.container == "vllm/vllm-openai:v0.30.0"
    assert any("env D" in line for line in made.left) and any("-p" in line for line in made.left)
    for environment in (["A=1", "B", "D", "HF_TOKEN", "E=${D}"], {"A": 1, "B": None, "D": None, "HF_TOKEN": None}):
        service = {"image": "vllm/vllm-openai", "command": "a/b", "environment": environment, "volumes": ["/a:/b"]}
        made = read(tmp_path, yaml.safe_dump({"services": {"v": service}}))
        assert dict(made.env) == {"A": "1", "B": "from here"}
        assert all(any(name in line for line in made.left) for name in ("env D", "env HF_TOKEN", "volumes"))
        assert not any("hf_secret" in line for line in made.left)


def test_no_secret_of_the_environment_is_read_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "of nobody's business")
    service: dict[str, Any] = {"image": "vllm/vllm-openai", "environment": ["MY_VAR=${WANDB_API_KEY}", "A=1"]}
    made = read(tmp_path, yaml.safe_dump({"services": {"v": service | {"command": "a/b"}}}))
    assert dict(made.env) == {"A": "1"} and any("MY_VAR" in line for line in made.left)
    with pytest.raises(ManifestError) as caught:
        read(tmp_path, yaml.safe_dump({"services": {"v": service | {"command": "a/b --seed $WANDB_API_KEY"}}}))
    assert not any("business" in text for text in (str(caught.value), *made.left))


def test_a_token_that_is_left_out_is_no_fault_of_what_is_checked(paths: Paths, tmp_path: Path) -> None:
    for variable, errors in (("HF_TOKEN", 0), ("VLLM_API_KEY", 1)):
        service = {"image": "vllm/vllm-openai", "command": "a/b", "environment": {variable: "0123456789abcdef"}}
        (tmp_path / "compose.yaml").write_text(yaml.safe_dump({"services": {"v": service}}))
        found = check.check(paths.project, str(tmp_path / "compose.yaml"), "cpu")
        assert len(found.errors) == errors, found.errors


@pytest.mark.parametrize(
    ("text", "env", "left"),
    [
        ("export_dir=/tmp\nexport A=1 B=$export_dir # c\nC=3\nexport C\nvllm serve a/b --port 1", "A=1 B=/tmp C=3", []),
        ("export\tA='x y=z' B=2\nD=1 pip install x==1\nvllm serve a/b --port 1", "A=x_y=z B=2", ["pip install"]),
        ('docker run -e A=$A --env "B=${B}" -eC="$C" -e "HF_TOKEN=$HF_TOKEN" v a/b --port 1', "A=a B=b",
         ["env C", "env HF"]),
        ("docker run -dp 8000:8000 -ite A=1 -itdeB=2 v a/b --port 1", "A=1 B=2", ["docker run -p"]),
        ("vllm serve a/b --port 1 2>&1 > 'a -b' | tee -a log\nsleep 1; curl x", "",
         ["tee -a log", "sleep 1; curl x"]),
        ("A_TOKEN=secret\nvllm serve a/b --port 1\nB_TOKEN=a_secret curl $A_TOKEN", "", ["curl"]),
        ("vllm serve a/b --port 1 &\nwhile true; do\ncurl x; done", "", ["'&'", "'while true; do'", "curl x"]),
        ("vllm serve a/b --port 1 > x-$(date -u).log", "", ["date"]),
        ("A=1 vllm serve a/b --port 1\ndocker run web", "A=1", ["docker run web"]),
        ("docker run -e A=1 -e B=2 v bash -c 'X=1; export C=3; B=4 && y; exec vllm serve a/b --port $X; z'",
         "A=1 B=4 C=3", ["before the server: 'y", "after the server: 'z"]),
    ],
)  # fmt: skip
def test_what_a_script_has_beside_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, env: str, left: list[str]
) -> None:
    for name, value in {"A": "a", "B": "b", "HF_TOKEN": "hf_secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("C", raising=False)
    made = read(tmp_path, text)
    assert render.render(made).argv == SERVED
    assert {f"{name}={value}".replace(" ", "_") for name, value in made.env.items()} == {*env.split()}
    assert len(made.left) == len(left) and all(any(part in line for line in made.left) for part in left), made.left
    assert not any("secret" in line.replace("no secret is read", "") for line in made.left)


@pytest.mark.parametrize("text", ["> log --port 1", "2>&1 >>log --port 1", "> 'a b' \\\n  --port 1", "< x --port 1"])
def test_a_flag_after_a_redirection_is_the_servers(tmp_path: Path, text: str) -> None:
    for start in ("vllm serve a/b", "docker run v a/b"):
        made = read(tmp_path, f"{start} {text}\n")
        assert render.render(made).argv == SERVED and any("redirection" in line for line in made.left)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("if [ -x y ]; then\n  echo z\nfi\nvllm serve a/b --port 1", ["[ -x y ]", "then", "echo z", "fi"]),
        ("start() {\n  export A=1\n}\nstart\nvllm serve a/b --port 1", ["start() {", "A=1", "}", "start"]),
        ("for x in a b; do\n  P=$x\n  if y; then (z) fi; done\nvllm serve a/b --port 1", ["P=$x", "if y", "done"]),
        ("case $1 in\n  a) P=3;;\n  *) P=4;;\nesac\nvllm serve a/b --port 1", ["case", "P=3", "esac"]),
        ("P=1\ncat > x <<'EOF'\nP=2\ndone\nEOF\nvllm serve a/b --port $P", ["P=2"]),
        ("P=1\nx | while read y; do\n A=$y\ndone\nvllm serve a/b --port $P", ["A=$y", "done"]),
        ('P=1\nfalse && P=3\n[ "$D" = 1 ] && P=4\nP=1 || P=5\nvllm serve a/b --port $P', ["P=3", "P=4", "P=5", "$D"]),
        ("x && { P=3; }\ncd x && P=1 && Q=$P\nvllm serve a/b --port $Q", ["x", "{ P=3; }", "cd x"]),
        ('W="--port"\nW+=" 1"\nvllm --version\nvllm serve a/b $W', ["vllm --version"]),
        ("echo $(date)\nvllm serve a/b --port 1\ncurl x \\\n  -d y", ["date", "curl x"]),
        ("x; if y; then\n  # a comment \\\n  curl z\nfi\nvllm serve a/b --port 1", ["curl z"]),
    ],
)
def test_what_is_not_followed_is_listed(tmp_path: Path, text: str, left: list[str]) -> None:
    made = read(tmp_path, text)
    assert render.render(made).argv == SERVED
    assert all(any(part in line for line in made.left) for part in left), made.left


def test_commands_before_the_server_are_counted_not_their_lines(tmp_path: Path) -> None:
    made = read(tmp_path, "cat > x <<EOF\n" + "a line\n" * 600 + "EOF\nvllm serve a/b --port 1")
    assert render.render(made).argv == SERVED
    with pytest.raises(ManifestError):
        read(tmp_path, "x\n" * 600 + "vllm serve a/b --port 1")


@pytest.mark.parametrize(
    "text",
    ["for i in 1 2; do\nvllm serve a/b --port $i\ndone", "start() {\n  vllm serve a/b\n}\nstart",
     "M=a/b\nif x; then\n  M=c/d\nfi\nvllm serve $M", "if x; then\nvllm serve a/b\nelse\nvllm serve c/d\nfi",
     "bash <<EOF\nvllm serve a/b\nEOF\nvllm serve c/d", "(\nM=c/d\nvllm serve a/b)\nvllm serve a/b", "vllm --version",
     "if x; then\n  P+=1\nfi\nP+=2\nvllm serve a/b --port $P", "M=$(cat x)\nvllm serve a/b", "vllm serve $(cat x)",
     "export A=1\nif x; then\n  A=2\nfi\nvllm serve a/b", "vllm serve a/b &\nvllm serve c/d",
     "vllm serve a/b & vllm serve c/d", "docker run v a/b\nif x; then\n  docker run vllm c/d\nfi",
     "unset A\nvllm serve a/b", "vllm serve a/b \\\n # x \\\n --port 1", "vllm serve a/b --port $NOBODY_SETS_THIS",
     "vllm serve a/b > 'x --port 1"],
)  # fmt: skip
def test_a_server_that_only_a_shell_could_tell_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ManifestError):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    ["vllm serve a/b --api-key SECRET`x`", "export HF_TOKEN=SECRET`x`\nvllm serve a/b", "vllm serve a/b 'SECRET",
     "export HF_TOKEN=SECRET -n x\nvllm serve a/b", "vllm serve a/b \\\n # x\n --api-key SECRET",
     "vllm serve a/b \\\n # x\n --api-key 'SECRET'", "docker run -e HF_TOKEN=SECRET -e 'A_KEY=a SECRET'",
     "HF_TOKEN=SECRET{a,b} vllm serve a/b", "vllm serve a/b | HF_TOKEN=SECRET tee log",
     "HF_TOKEN=SECRET x $(y)\nvllm serve a/b", "docker login -u me -p SECRET x\nvllm serve a/b",
     "huggingface-cli login --token SECRET\nvllm serve a/b", "vllm serve a/b\ncurl -H 'Authorization: Bearer SECRET' x",
     "vllm serve a/b\ncurl -H \"Authorization: Bearer SECRET\" x", "vllm serve a/b\nx hf_SECRET" + "a" * 30,
     "bash -c \"A=1 HF_TOKEN=SECRET x\"\nvllm serve a/b", "docker run --label HF_TOKEN=SECRET v a/b",
     "if x; then\n  export HF_TOKEN=SECRET\nfi\nvllm serve a/b", "x <<EOF\nHF_TOKEN: SECRET\nEOF\nvllm serve a/b",
     "cat > k <<EOF\n-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----\nEOF\nvllm serve a/b",
     "x <<EOF\n-----BEGIN PRIVATE KEY-----\nDEK-Info: AES-1\n\nSECRET\n-----END PRIVATE KEY-----\nEOF\nvllm serve a/b",
     "echo '-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----' > k\nvllm serve a/b",
     "x --password \\\n SECRET\nvllm serve a/b", "vllm serve a/b\nx --password \\\n SECRET",
     "x | y --password \\\n SECRET\nvllm serve a/b", "vllm serve a/b | y --pass\\\nword SECRET",
     "curl -H 'Authorization: Bearer\n SECRET' x\nvllm serve a/b", "x 'API_KEY=a\nSECRET'\nvllm serve a/b",
     "services: {v: {image: vllm, command: a/b, build: {args: {HF_TOKEN: SECRET}}}}",
     "name: r\ncontainer: c\nrecipe_version: '1'\napi_key: SECRET\ncommand: vllm serve a/b"],
)  # fmt: skip
def test_no_secret_of_a_file_is_shown(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "r.sh").write_text(text)
    told = ""
    file = str(tmp_path / "r.sh")
    for task in (lambda: tasks.recipe_check(paths, [file]), lambda: add.add(paths, file, no_lock=True)):
        try:
            task()
        except SparkpinError as error:
            told += str(error)
    made = paths.project / "recipes/r.yaml"
    told += capsys.readouterr().out + (made.read_text() if made.exists() else "")
    assert told and "SECRET" not in told


def test_what_a_line_of_the_command_names_wrongly(paths: Paths, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    file = folder / "run.sh"
    file.write_text("vllm serve a/b\n")
    (folder / "folder.yaml").mkdir()
    (folder / "dead.yaml").symlink_to(folder / "nothing")
    for wrong in (
        lambda: tasks.recipe_check(paths, [str(file)], stack="nosuch"),
        lambda: add.add(paths, str(file), no_lock=True, model="c/d"),
        lambda: add.add(paths, str(folder), no_lock=True),
        lambda: tasks.recipe_check(paths, [str(folder / "folder.yaml")]),  # no recipe is in it
    ):
        with pytest.raises(InputError) as caught:
            wrong()
        assert "no such file" not in str(caught.value)
    (folder / "r.yaml").write_text("model: a/b\ncommand: vllm serve {model}\n")
    (folder / "other.sh").write_text("echo vllm\n")
    assert tasks.subjects([str(folder)]) == [str(folder / "r.yaml"), str(file)]
    with pytest.raises(InputError):
        add.add(paths, str(folder / "r.yaml"), no_lock=True, model="c/d")
    assert not add.add(paths, str(file), no_lock=True, model="a/b")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "- 1\n- {a: b}", "docker run", "docker run -e", "docker run x", "vllm serve", "docker run 'x",
        "services: 1", "services: {}", "services: {v: 1}", "services: {v: {image: [vllm]}}", "{" * 5000,
        "services: {a: {image: vllm}, b: {image: vllm}}", "services: {v: {image: vllm, command: 'a \"b'}}",
        "services: {v: {image: vllm, command: [[1], {a: b}], environment: 3, entrypoint: 1}}",
        "services: {v: {image: '${NOBODY_SETS_THIS}/vllm'}}",
        "services: {v: {image: vllm, command: ['bash', '-c', '(']}}",
        "!!python/object:x {}", "a: !!set {b}", "model: [a]\ncommand: {b: 1}", "model: a/b\ndefaults: 1\nenv: [x]",
        "docker run x $(y)", "if true; then\nvllm serve a/b; fi", "vllm serve a/b <(x)", "vllm serve a/b --port `x`",
        "vllm serve a/b " + "--speculative-config " + "[" * 5000, "vllm serve a/b --port " + "9" * 5000,
        "vllm serve a/b -cc.a", "vllm serve a/b -cc.a.b 1 -cc.a 2 -cc.a.b.c 3",
        "docker run#", "vllm serve a/b --x.y=1 -O -Ox --no- --",
    ],
)  # fmt: skip
def test_what_is_malformed_ends_without_a_traceback(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(transfer, "TRIES", 1)  # where a model can be read from it, the Hub is asked for it
    (tmp_path / "r.sh").write_text(text)
    for task in (tasks.recipe_check, add.add):
        try:
            subject: Any = [str(tmp_path / "r.sh")] if task is tasks.recipe_check else str(tmp_path / "r.sh")
            task(paths, subject)
        except SparkpinError as error:
            assert len(str(error)) < 5000


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00" * 100, b"vllm serve a/b \x1b[2J"])
def test_bytes_that_are_no_text(paths: Paths, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.sh").write_bytes(content)
    with pytest.raises(SparkpinError):
        add.add(paths, str(tmp_path / "r.sh"))


def test_a_folder_is_served_and_its_repository_is_named(paths: Paths, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("docker run -v /m:/m vllm/vllm-openai --model /m/x --gpu-memory-utilization 0.7\n")
    with pytest.raises(ManifestError) as caught:
        add.add(paths, str(file), no_lock=True)
    assert "--model" in caught.value.next_step
    assert not add.add(paths, str(file), no_lock=True, model="a/b")
    assert manifests.load_recipe(paths.project, "b").model == "a/b", "a name that any file has is none"
    assert "its size is unknown" in "".join(map(str, check.check(paths.project, "b").found))


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ("--max-num-seqs 1k", False), ("--max-num-seqs 0", False), ("--max-num-batched-tokens 1k", True),
        ("--max-model-len auto", True), ("--attention-backend auto", True), ("--gpu-memory-utilization 1.5", False),
        ("--limit-mm-per-prompt [1]", False), ("--compilation-config {", False), ("-cc.mode 3", True),
        ("--compilation-config.nope 1", False), ("--kv-transfer-config {\"kv_role\":\"x\"}", False),
        ("--hf-overrides none", True), ("--enforce-eager", True), ("--no-enforce-eager 1", False),
    ],
)  # fmt: skip
def test_values_are_judged_by_the_type_of_their_flag(version: str, words: str, taken: bool) -> None:
    parser, flags = parser_of(version), parse_flags(words.split())[1]
    try:
        parser.require(parser.flag(flags[0].words[0]) or "", parser.parsed(flags))
        fault = ""
    except Refused as refused:
        fault = str(refused)
    assert (fault == "") is taken, fault


if CASES.is_dir():  # a clone alone has none of them

    @pytest.mark.parametrize(
        ("name", "errors"),
        [
            ("02-attention-backend-auto/recipe.yaml", []),
            ("21-max-num-seqs-1k/recipe.yaml", ["--max-num-seqs"]),
            ("22-kv-connector-and-segments/recipe.yaml", ["PYTORCH_CUDA_ALLOC_CONF"]),
            ("24-vllm-by-its-path/recipe.yaml", []),
            ("25-not-a-recipe/compose.yaml", []),
            ("25-not-a-recipe/run.yaml", []),
            ("28-397-billion-on-one/recipe.yaml", ["weights"]),
            ("models/01-qwen3.8-27b-docker-run/run.sh", []),
            ("models/02-coder-next-docker-run/run.sh", ["--model"]),
            ("models/05-glm-5.3-flash-exl3/recipe.yaml", ["--chat-template", "--quantization exl3"]),
            ("models/06-flash-next-table-on-disk/recipe.yaml", ["VLLM_PLE_MMAP", "126 GB", "weights"]),
            ("models/08-export-path/recipe.yaml", ["--max-num-partial-prefills"]),
            ("models/09-wrong-tool-parser/recipe.yaml", []),
        ],
    )
    def test_a_case_gives_what_it_is_expected_to(paths: Paths, name: str, errors: list[str]) -> None:
        found = check.check(paths.project, str(CASES / name))
        assert len(found.errors) == len(errors), found.errors
        assert all(part in str(error) for part, error in zip(errors, found.errors, strict=True)), found.errors

    def test_what_a_case_is_warned_of(paths: Paths) -> None:
        for name, parts in {
            "27-hint-for-a-variable-that-is-gone/recipe.yaml": ["write --moe-backend", "write --attention-backend"],
            "models/09-wrong-tool-parser/recipe.yaml": ["--tool-call-parser qwen3_coder"],
        }.items():
            found = check.check(paths.project, str(CASES / name)).found
            assert all(any(part in str(one) for one in found) for part in parts), name

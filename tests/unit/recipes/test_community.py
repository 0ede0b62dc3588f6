"""Reading the community's recipes as their runners do: placeholders, braces, bash's words, what is taken from where."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparkpin.core.errors import InputError, ManifestError
from sparkpin.recipes import recipe, render
from sparkpin.recipes.shell import Shell, ShellCommand

V1 = {"recipe_version": "1", "name": "R", "model": "a/b", "container": "c"}
V2 = {"recipe_version": "2", "model": "a/b", "runtime": "vllm", "container": "c"}


def written(folder: Path, value: Any, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return path


def made(
    folder: Path, base: dict[str, Any], command: str | None, name: str = "r.yaml", **more: Any
) -> recipe.CommunityRecipe:
    value = base | more | ({} if command is None else {"command": command})
    return recipe.load(written(folder, value, name))


def commands(script: str, values: dict[str, str]) -> list[ShellCommand]:
    shell = Shell("f", script, dict(values))
    read = (shell.read() for _ in shell.commands())
    return [command for command in read if not shell.sets(command)]


# What a template becomes.


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("--p {port}", {"port": 1}, "--p 1"),
        ("""'{{"n": {n}}}'""", {"n": 2}, """'{"n": 2}'"""),
        ("'{c}'", {"c": '{"m": {"k": 1}}'}, """'{"m": {"k": 1}}'"""),
        ("{flag}", {"flag": True}, "True"),
        ("{u:.2f}", {"u": 0.9}, "0.90"),
    ],
)
def test_version_1_is_format(template: str, values: dict[str, Any], text: str) -> None:
    assert render.fill_v1(template, values, "f") == text


def test_what_fills_the_memory_is_refused_before_it_does() -> None:
    values = {"a": "{b}" * 4000, "b": "{c}" * 4000, "c": "x" * 4000}
    with pytest.raises(ManifestError):
        render.fill_v2("{a}", values, "f")
    with pytest.raises(ManifestError):
        render.fill_v1("{c}" * 4000, values, "f")


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("""'{"n": {n}}'""", {"n": 2}, """'{"n": 2}'"""),
        ("""'{"a":{"b":1}}'""", {}, """'{"a":{"b":1}}'"""),
        ("""'{{"a":{{"b":{n}}}}}'""", {"n": 2}, """'{"a":{"b":2}}'"""),
        ("""{{"a":1}} {"b":2}""", {}, """{"a":1} {"b":2}"""),
        ("{url}", {"url": "http://h:{port}", "port": 8}, "http://h:8"),
        ("{unknown} {none}", {"none": None}, "{unknown} {none}"),
        ("'{c}'", {"c": '{"m": {n}}', "n": 1}, """'{"m": {n}}'"""),
        ("--a \\  \n --b \\\t\n --c", {}, "--a \\\n --b \\\n --c"),
        ("${{HOME}}", {}, "${HOME}"),
        ("${HOME}", {}, "${HOME}"),
    ],
)
def test_version_2_knows_placeholders_from_json(template: str, values: dict[str, Any], text: str) -> None:
    assert render.fill_v2(template, values, "f") == text


# What bash makes of it.

SCRIPTS = [
    "p a 'b c' \"d $X\" e\\ f",
    "p --a \\\n  --b",
    "p --a \\ \n--b",
    "p --a # c \\\nq b",
    "p a#b #c",
    "p '' \"\"",
    'p "a\\"b\\n\\$X" \\"c',
    'p "a\\\nb"',
    "X=5 p \"${X}\" $X ${Y:-d} ${Z:-two words} \"${Z:-two words}\"",
    "p \"$E\" $E \"${E-a}\" ${E:-b} ${Y-c} \"${Y:-}\"",
    "p {} {a} a{b '{1,2}' \"{1,2}\" {{a}}",
    "p $ a$ \"$\"",
    "p ~ ~/a a~ '~';p ~&&p ~",
    "p $X\\\n a ${X}\\\nb",
    "p a;p b",
    "p a && p b",
    "# nothing\n\np a\\",
    "p {\\\"a\\\":1}",
    "p --x={\"a\":1}",
    "p $SET\\\n${E:-a}", "p ${E:-}${E-b}", "p ${E:-a b} \"${E:-a b}\"", "p {{a}} {a{b}c} {} }{ {a",
    "p \"$VAR\" $VAR", "p a#b~c",
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(script: str, tmp_path: Path) -> None:
    env = {"X": "v w", "SET": "v w", "E": "", "HOME": "/home", "NAME": "${NAME}", "VAR": "${OTHER:-$NAME} {a,b}"}
    text = f"p() {{ printf '%s\\0' p \"$@\"; printf '\\1'; }}; q() {{ p q \"$@\"; }}\n{script}\n"
    done = subprocess.run(["bash", "--norc"], input=text, env=env, cwd=tmp_path, capture_output=True, text=True)
    wanted = [part.split("\0")[:-1] for part in done.stdout.split("\1")[:-1]]
    found = [command.words for command in commands(script, env) if command.words[0] in ("p", "q")]
    assert [["p", *words] if words[0] == "q" else words for words in found] == wanted


@pytest.mark.parametrize(
    "script",
    ["p $(date)", "p `date`", 'p "$(date)"', "p $'a'", "p $1", "p $NODE_IP", "p {a,b}", 'p {"a":1,"b":2}', "p {1..3}",
     "p 'a", 'p "a', "(p a)", "p ${A:-$NAME}", "p ${A:-${NAME}}", "p $NA\\\nME", "p ${A:-'b'}",
     'p ${A:-"b"}', "p ${A:-$(b)}", "p ${A:-" * 30 + "}" * 30, "p $RANDOM", "p ${PPID}", "p ${UID:-d}", "p ${HOME:-d}"],
)  # fmt: skip
def test_what_only_a_shell_could_expand_is_refused(script: str) -> None:
    with pytest.raises(ManifestError) as caught:
        commands(f"\n{script}", {})
    assert caught.value.key == "command, line 2"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("vllm serve a/b --x $(a) \\\n  --y 1 \\\n  --z 2", 1),
        ("cd x\n\nvllm serve a/b \\\n--x=$(a) \\\n  --z 2", 4),
        ("vllm serve a/b \\\n  --x 'a \\\n  --z 2", 2),
        ("cd x\nfor i in 1; do\n  vllm serve a/b\n  x\ndone", 3),
    ],
)
def test_a_fault_names_its_own_line(script: str, line: int) -> None:
    with pytest.raises(ManifestError) as caught:
        Shell("f", script, {}).launch()
    assert caught.value.key == f"command, line {line}"


# What the server gets.


def test_a_blank_after_a_backslash_ends_the_command_of_version_1(tmp_path: Path) -> None:
    command = "vllm serve {m} \\\n  --a \\ \n  --port 1"
    comment = made(tmp_path, V2, "vllm serve {model} \\\n  --a \\\n  # --b \\\n  --port 1", "comment.yaml")
    for lost in (made(tmp_path, V1, command, defaults={"m": "a/b"}), comment):
        with pytest.raises(ManifestError) as caught:
            render.render(lost)
        assert caught.value.got == "--port 1"
    second = render.render(made(tmp_path, V2, command.replace("{m}", "{model}")))
    assert (second.argv, second.left) == (("vllm", "serve", "a/b", "--a", "--port", "1"), [])


def test_one_machine_of_version_1(tmp_path: Path) -> None:
    command = "vllm serve a/b \\\n --distributed-executor-backend ray \\\n -tp {tensor_parallel}"
    read = made(tmp_path, V1, command, defaults={"tensor_parallel": 2})
    assert render.render(read, single=True).argv == ("vllm", "serve", "a/b", "-tp", "1")


def test_a_missing_key(tmp_path: Path) -> None:
    assert render.render(made(tmp_path, V2, "vllm serve {model} --port {port}")).missing == ("port",)
    assert render.render(made(tmp_path, V2, "vllm serve {model} --port ${PORT}", env={"PORT": 1})).missing == ()


def test_environment_is_text_and_json_in_it_survives(tmp_path: Path) -> None:
    env = {"A": 1, "B": True, "C": '{"a":{"b":"c"}}', "D": "x $HOME"}
    read = made(tmp_path, V1, "vllm serve a/b", env=env)
    assert render.render(read).env == {"A": "1", "B": "True", "C": '{"a":{"b":"c"}}', "D": "x $HOME"}


@pytest.mark.parametrize("value", ['{\\"a\\": 1}', "a\\\\b", "a\\b", "\\$x", "\\`", "C:\\\\\\\\d", "'q'", "a b"])
def test_what_was_escaped_for_the_script_comes_out_as_from_bash(tmp_path: Path, value: str) -> None:
    read = made(tmp_path, V1, "vllm serve a/b", env={"A": value})
    script = f'export A="{value}"\nprintf %s "$A"'
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert render.render(read).env == {"A": done.stdout}
    assert render.meant(render.escaped(done.stdout)) == done.stdout


def test_what_the_script_says_before_the_server(tmp_path: Path) -> None:
    command = "set -e\nexport A=1 B='x y'\npip install z && C=3 exec vllm serve {model} --a $A"
    got = render.render(made(tmp_path, V2, command))
    assert got.argv == ("vllm", "serve", "a/b", "--a", "1")
    assert got.env == {"A": "1", "B": "x y", "C": "3"}
    assert len(got.left) == 1 and "pip install z" in got.left[0]


def test_what_starts_the_server_is_no_part_of_it(tmp_path: Path) -> None:
    read = made(tmp_path, V2, "A=1 env B=2 C='x y' nohup vllm serve {model} --a b=c > log 2>&1 &")
    got = render.render(read)
    assert (got.argv, got.env) == (("vllm", "serve", "a/b", "--a", "b=c"), {"A": "1", "B": "2", "C": "x y"})
    assert len(got.left) == 1 and "> log 2>&1 &" in got.left[0]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_line_ends_and_a_byte_order_mark(tmp_path: Path, start: str, end: str) -> None:
    head = ['recipe_version: "1"', "name: R", "container: c", "defaults: {port: 1}"]
    lines = [*head, "command: |", "  vllm serve a/b \\", "    --port {port}", ""]
    path = tmp_path / "r.yaml"
    path.write_bytes((start + end.join(lines)).encode())
    assert render.render(recipe.load(path)).argv == ("vllm", "serve", "a/b", "--port", "1")


def test_version_2_without_a_command(tmp_path: Path) -> None:
    defaults = {"port": 8, "tensor_parallel": 1, "trust_remote_code": True, "enable_prefix_caching": False,
                "speculative_config": {"method": "mtp", "n": 1}, "unheard_of": 1}  # fmt: skip
    got = render.render(made(tmp_path, V2, None, defaults=defaults, model_revision="f" * 40))
    start = (
        f"vllm serve a/b --revision {'f' * 40} -tp 1 --no-enable-prefix-caching --gpu-memory-utilization 0.8 --port 8"
    )
    assert got.argv == (*start.split(), "--speculative-config", '{"method":"mtp","n":1}', "--trust-remote-code")


# What is in a file.


@pytest.mark.parametrize("more", [{"include": "base"}, {"overrides": [{"when": {"nodes": 1}, "env": {"A": 1}}]}])
def test_what_no_public_recipe_has_is_refused_by_its_key(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ManifestError) as caught:
        made(tmp_path, V2, "vllm serve {model}", **more)
    assert caught.value.key == next(iter(more)) and caught.value.next_step


def test_keys_that_stand_twice_count_as_their_runners_count_them(tmp_path: Path) -> None:
    text = 'recipe_version: "1"\nname: R\ncontainer: a\ncontainer: b\ncommand: vllm serve a/b\n'
    read = recipe.load(written(tmp_path, text))
    assert (read.container, read.repeated) == ("b", {"container": 4})


def test_merge_keys_and_anchors_of_yaml(tmp_path: Path) -> None:
    text = (
        "base: &b {port: 1, host: h}\nmodel: a/b\ncommand: vllm serve {model} {port}\ndefaults:\n  <<: *b\n  port: 2\n"
    )
    read = recipe.load(written(tmp_path, text))
    assert (dict(read.defaults), read.repeated) == ({"port": 2, "host": "h"}, {}), "what `<<` brings may be changed"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("- a", "(whole file)"),
        (b"model: \xff", "(whole file)"),
        ("a: [", "line 2"),
        ('recipe_version: "1"\nname: R\ncontainer: c\n', "command"),
        ("runtime: vllm\n", "model"),
        ("model: a/b\ncommand: [vllm]\n", "command"),
        ("model: a/b\ndefaults: [1]\n", "defaults"),
        ("model: a/b\nlines: \x07\n", "(whole file)"),
    ],
)
def test_a_file_that_no_runner_could_start(tmp_path: Path, text: str | bytes, key: str) -> None:
    path = tmp_path / "r.yaml"
    with pytest.raises(InputError):
        recipe.load(path)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ManifestError) as caught:
        recipe.load(path)
    assert caught.value.key == key

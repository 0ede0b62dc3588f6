"""From a recipe to the command line: the community's format, version 1, and what stack and stages add."""

from __future__ import annotations

from typing import Any

import pytest
from made_recipes import recipe, stack, stage

from sparkpin.core.errors import ManifestError
from sparkpin.pins import vllm_command, vllm_flags

BARE = ["vllm", "serve", "/model"]


def argv_of(*args: Any) -> list[str]:
    return vllm_command.serve_argv(*args)[0]


def test_defaults_go_in_braces_are_doubled_and_lines_joined() -> None:
    command = """vllm serve a/b \\\n --a '{{"n": {n}}}' --b '{config}' {more} --served-model-name x"""
    defaults = {"n": 2, "config": '{"m": "{n}"}', "more": "--x 1 --y"}
    argv = argv_of(recipe(command, defaults=defaults), stack(), ())
    wanted = ["--a", '{"n": 2}', "--b", '{"m": "{n}"}', "--x", "1", "--y", "--served-model-name", "x"]
    assert argv == [*BARE, *wanted]


@pytest.mark.parametrize(
    ("command", "got"),
    [
        ("vllm serve a/b --port {prot}", "{prot}"),
        ("vllm serve a/b --x {port.no}", "has no attribute"),
        ("""vllm serve a/b --x '{"method": "mtp"}'""", '{"method"}'),
        ("python -m vllm a/b", "python -m vllm"),
        ("vllm serve a/b --ssl-certfile c", "--ssl-certfile"),
        ("vllm serve other/model", "other/model"),
        ('vllm serve a/b --x {{"n":2}}', "{n:2}"),
        ("""vllm serve a/b --x '{{"n":2,}}'""", '{"n":2,}'),
    ],
)
def test_a_faulty_command_is_refused(command: str, got: str) -> None:
    with pytest.raises(ManifestError) as caught:
        argv_of(recipe(command, defaults={"port": 1, "host": "h"}), stack(), ())
    fault = caught.value
    assert (fault.file, fault.key) == ("recipes/r.yaml", "command") and got in str(fault.got) and fault.next_step


def test_a_later_stage_s_flag_takes_the_place_of_an_earlier_one_s() -> None:
    command = "vllm serve a/b --kv-cache-dtype fp8 --port 1 --served-model-name x"
    chain = (
        stage(flags={"--speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}),
        stage(flags={"--speculative-config": {"method": "mtp", "num_speculative_tokens": 2}, "--kv-cache-dtype": "tq"}),
    )
    argv = argv_of(recipe(command), stack(flags={"--enforce-eager": None, "--kv-cache-dtype": "auto"}), chain)
    assert argv == [
        *("vllm", "serve", "/model", "--kv-cache-dtype", "tq", "--port", "1", "--served-model-name", "x"),
        *("--enforce-eager", "--speculative-config", '{"method":"mtp","num_speculative_tokens":2}'),
    ]


@pytest.mark.parametrize(
    ("words", "name", "value", "result"),
    [
        (["--port=1"], "--port", 2, ["--port", "2"]),
        (["-tp", "2"], "--tensor-parallel-size", 4, ["--tensor-parallel-size", "4"]),
        (["--enable-prefix-caching"], "--no-enable-prefix-caching", None, ["--no-enable-prefix-caching"]),
        (["--enable-x"], "--enable-x", False, ["--no-enable-x"]),
        ([], "--no-enable-x", False, ["--enable-x"]),
        (["--sc.method", "mtp", "--sc.n", "2", "--z"], "--sc", {"n": 1}, ["--sc", '{"n":1}', "--z"]),
        (["--port", "1", "--z", "--port", "2"], "--port", 3, ["--port", "3", "--z"]),
        (["--sizes", "1", "2", "--z"], "--sizes", [4, 8], ["--sizes", "4", "8", "--z"]),
        (["--portal", "1"], "--port", 2, ["--portal", "1", "--port", "2"]),
        (["--middleware", "a.B", "--z"], "--middleware", "c.D", ["--middleware", "a.B", "--z", "--middleware", "c.D"]),
        (["--middleware=c.D", "--z"], "--middleware", "c.D", ["--middleware=c.D", "--z"]),
        ([], "--kinds", [{"n": 1}, True], ["--kinds", '{"n":1}', "true"]),  # not as Python would write them
    ],
)
def test_setting_a_flag(words: list[str], name: str, value: Any, result: list[str]) -> None:
    assert vllm_flags.set_flag([*BARE, *words], name, value) == [*BARE, *result]


def test_dropping_and_reading_flags() -> None:
    argv = [*BARE, "--host", "h", "--port=1", "-tp", "2", "--port", "9"]
    assert vllm_flags.drop_flags(argv, "--host", "--port") == [*BARE, "-tp", "2"]
    values = [vllm_flags.flag_value(argv, name) for name in ("--port", "--tensor-parallel-size", "--absent")]
    assert values == ["9", "2", None]


def test_sizes_with_a_unit() -> None:
    assert [vllm_flags.size(text) for text in ("1.5k", " 3K ", "32768", "2m")] == [1500, 3072, 32768, 2_000_000]
    for text in ("1_0K", "3 K", "٣K", "٣k", "1.5K", "K", ""):
        with pytest.raises(ValueError):
            vllm_flags.size(text)


def test_clients_keep_the_repository_s_name() -> None:
    assert vllm_flags.served_name(argv_of(recipe(), stack(), ())) == "a/b"
    assert vllm_flags.served_name(argv_of(recipe("vllm serve /model --served-model-name x y"), stack(), ())) == "x"


def test_environment_is_text_and_later_parts_win() -> None:
    own, chain = recipe(env={"A": 1, "B": True, "C": "c"}), (stage(env={"D": "t"}),)
    _, env = vllm_command.serve_argv(own, stack(env={"C": "s", "D": 0.5}), chain)
    assert env == {"A": "1", "B": "1", "C": "s", "D": "t"}

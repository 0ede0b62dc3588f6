"""A copy of the checkout with a home of its own, whose tasks are run as a person runs them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from places import PROJECT, copied_to, rewrite
from private_engine import remove_tags

from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.compile_caches import volume_name

INVOKE = [str(Path(sys.executable).parent / "invoke")]
LONGEST = 3600  # seconds: two servers, started and asked beside another lane of the tests on slow cores


def heeds_interrupts() -> None:
    """For a new process that a test sends SIGINT: whoever started the tests with `&` had it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Checkout:
    """folder: holds tasks.py; home: SPARKPIN_HOME. The cache is the machine's: what it holds is verified on use."""

    CODE: ClassVar = ("src",)
    folder: Path
    home: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        copied_to(folder, *cls.CODE)
        shutil.copy(PROJECT / "tasks.py", folder)
        return cls(folder, folder.with_name(folder.name + "-home"))

    @classmethod
    def clone(cls, folder: Path) -> Checkout:
        """With all that install.sh reads; it has not run there."""
        made = cls.make(folder)
        for name in ("install.sh", "requirements.lock", "pyproject.toml"):
            shutil.copy(PROJECT / name, made.folder)
        return made

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder / "src"), "SPARKPIN_HOME": str(self.home)}

    def invoke(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*INVOKE, *arguments],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*INVOKE, *arguments], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True, preexec_fn=heeds_interrupts,
        )  # fmt: skip

    def done(self, *arguments: str, **env: str) -> str:
        """Output of a task that must succeed."""
        result = self.invoke(*arguments, **env)
        assert result.returncode == 0, f"invoke {' '.join(arguments)}:\n{result.stdout}{result.stderr}"
        return result.stdout

    def images(self) -> list[dict[str, Any]]:
        rows = json.loads(self.done("images", "--json"))
        assert isinstance(rows, list)
        return rows

    def release(self, **wanted: str) -> dict[str, Any]:
        """The newest release with these values; `invoke images` lists the newest first."""
        return next(row for row in self.images() if all(row[key] == value for key, value in wanted.items()))

    def evidence(self, tag: str) -> Path:
        """Where the smoke test of a release has left its evidence."""
        recipe, _, name = tag.removeprefix("sparkpin/").partition(":")
        return self.home / "releases" / recipe / name / "smoke"

    def replace(self, file: str, old: str, new: str) -> None:
        """Edit a file as a person would; `old` must be there."""
        path = self.folder / file
        text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        rewrite(path, text.replace(old, new, 1))

    def ask_only(self, *checks: str) -> None:
        """What smoke tests ask of the first stage and of those above it, which may add more of their own."""
        stage = self.folder / "stages/base.yaml"
        head, key, _ = stage.read_text().partition("  checks:\n")
        rewrite(stage, f"{head}{key}" + "".join(f"    - {check}\n" for check in checks))

    @staticmethod
    def remove_tags(recipe: str) -> None:
        """The tags of a recipe; the images under them may be the machine's own and keep their other tags."""
        remove_tags(Engine.connect(), recipe)

    def change_mod(self, name: str) -> None:
        """Another source than anybody has had: the images from its stage on are made anew."""
        init = self.folder / f"mods/{name}/sparkpin_{name.replace('-', '_')}/__init__.py"
        rewrite(init, f"{init.read_text()}\n# {time.time_ns()}\n")

    def remove_built(self, recipe: str) -> None:
        """Its tags, and what only this checkout has made in the engine."""
        engine = Engine.connect()
        self.remove_tags(recipe)
        machine = {path.name for path in Paths.from_env(PROJECT).images.iterdir()}
        for path in (self.home / "images").iterdir():
            if path.name not in machine:
                made = json.loads(path.read_text())
                engine.untag(made["ref"])
                for volume in engine.client.volumes.list(filters={"name": volume_name(made["key"])}):
                    volume.remove(force=True)

    def add_recipe(self, name: str, **changes: str) -> None:
        """A copy of the scripted-tiny recipe under another name, so that its tags meet nobody else's."""
        text = (self.folder / "recipes/scripted-tiny.yaml").read_text()
        (self.folder / f"recipes/{name}.yaml").write_text(text.replace("name: scripted-tiny", f"name: {name}", 1))
        for old, new in changes.items():
            self.replace(f"recipes/{name}.yaml", old, new)

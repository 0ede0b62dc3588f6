"""A systemd unit that serves a recipe's current release after a reboot (unit.service.j2).

Docker's own policy "on-failure" starts a container at boot only where it had no time to end in good order (a power cut:
exit code 255), and "always" has no limit; besides, `serve` looks after what the container is given (tag, checkpoint,
port) before it starts it. One that Docker has started already is left alone.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show_file
from sparkpin.serve.served import read

TEMPLATE = Path(__file__).with_name("unit.service.j2")


def name_of(recipe: str) -> str:
    return f"sparkpin-{recipe}.service"


def word(text: object, *, variables: bool = True) -> str:
    """As systemd.syntax(7) has it: no specifier, one word. variables: systemd would replace them there."""
    found = str(text).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{found.replace("$", "$$") if variables else found}"'


def unit_text(
    recipe: str, invoke: Path, project: Path, env: Mapping[str, str], machines: Sequence[str] = (), *, system: bool
) -> str:
    """system: for root's systemd, else for a user's own, which knows no units of the system to wait for.

    machines: URLs of other machines of the recipe, whose engines it waits for: they may take longer to start than this
    one, and `serve` would use up its attempts."""
    from jinja2 import Environment, StrictUndefined  # slow to import

    jinja = Environment(undefined=StrictUndefined, trim_blocks=True)
    jinja.filters |= {"word": word, "quote": shlex.quote}
    values = {"recipe": recipe, "name": name_of(recipe), "invoke": invoke, "project": project, "env": env}
    return jinja.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values, machines=machines, system=system)


def show_unit(paths: Paths, recipe: str) -> None:
    """Its `serve` knows the last address."""
    # `invoke` runs the tasks.py of the folder; that of another checkout need not fit this code.
    program = "invoke" if Path(__file__).resolve().is_relative_to(paths.project) else "sparkpin"
    env = {"SPARKPIN_HOME": str(paths.home), "SPARKPIN_CACHE": str(paths.cache)}  # systemd has no shell's XDG_DATA_HOME
    env |= {"SPARKPIN_PROJECT": str(paths.project)} if program == "sparkpin" else {}  # named: it may be another user's
    env |= {name: os.environ[name] for name in ("DOCKER_HOST",) if os.environ.get(name)}
    its = read(paths.home, recipe).cluster
    others, invoke = its.urls[1:] if its else (), Path(sys.executable).parent / program
    show_file(unit_text(recipe, invoke, paths.project, env, others, system=os.geteuid() == 0))

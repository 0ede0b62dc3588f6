"""The unit of `serve --unit` in a real systemd: started at boot, tried again, stopped at shutdown. Docker and `invoke`
are scripts that write down how they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
from booted import booted, make_root
from watched import until

from sparkpin.serve import unit

pytestmark = pytest.mark.slow

INVOKE = """#!/bin/sh
for word; do echo "$word"; done >> /calls
echo "home $SPARKPIN_HOME in $(pwd)" >> /calls
test ! -e /broken
"""
DOCKER = """#!/bin/sh
echo "$*" >> /asked
test ! -e /away
"""
SERVED = ["serve", "--recipe", "r", "home /h 100% in /project"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = make_root(tmp_path)
    for path, text in {"opt/in voke": INVOKE, "usr/bin/docker": DOCKER}.items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text(text)
        (made / path).chmod(0o755)
    (made / "project").mkdir()
    units = made / "etc/systemd/system"
    (units / "docker.service").write_text("[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/sh -c :\n")
    (units / unit.name_of("r")).write_text(
        unit.unit_text(
            recipe="r",
            invoke=Path("/opt/in voke"),
            project=Path("/project"),
            env={"SPARKPIN_HOME": "/h 100%"},
            system=True,
            machines=("ssh://me@b",),
        )
    )
    (units / "multi-user.target.wants" / unit.name_of("r")).symlink_to(units / unit.name_of("r"))  # `enable`
    (units / f"{unit.name_of('r')}.d").mkdir()
    (units / f"{unit.name_of('r')}.d/soon.conf").write_text("[Service]\nRestartSec=1\n")  # 30, as it comes
    return made


def calls(root: Path) -> list[str]:
    file = root / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_it_serves_after_each_boot_once_the_other_machine_is_there_and_stops_at_shutdown(root: Path) -> None:
    (root / "away").touch()
    with booted(root) as machine:
        until(lambda: (root / "asked").exists(), 30)
        assert "activating" in machine.state(unit.name_of("r")) and calls(root) == []
        (root / "away").unlink()
        until(lambda: "active exited" in machine.state(unit.name_of("r")), 30)
        assert "active" in machine.state("docker.service")
        assert (root / "asked").read_text().splitlines()[0] == "-H ssh://me@b version" and calls(root) == SERVED
    (root / "calls").unlink()
    with booted(root) as machine:  # its power was cut
        until(lambda: "active exited" in machine.state(unit.name_of("r")), 30)
        assert calls(root) == SERVED
        machine.systemctl("start", "shutdown.target")
        until(lambda: "inactive dead" in machine.state(unit.name_of("r")), 30)
        assert calls(root)[len(SERVED) :][:3] == ["stop", "--recipe", "r"]


def test_what_fails_is_tried_three_times_in_an_hour(root: Path) -> None:
    (root / "broken").touch()
    with booted(root) as machine:
        until(lambda: "failed" in machine.state(unit.name_of("r")), 60)
    assert calls(root).count("serve") == 3

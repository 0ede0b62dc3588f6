"""What `invoke check` cannot see in a template: the files of the image that came of it."""

from __future__ import annotations

import json

from in_container import output_of
from places import PROJECT

from sparkpin.build.pair import pair
from sparkpin.cli import developer
from sparkpin.host.engine import Engine
from sparkpin.pins.values import SECRET_NAME

LEFT = (".netrc", "_netrc", ".git-credentials", ".npmrc", ".pypirc", ".docker", ".ssh", "pip.conf", ".aws", "id_rsa")
LEFT += ("id_ed25519", ".huggingface", "stored_tokens", ".env")


def test_the_last_image_of_the_chain_holds_no_credentials_and_does_not_run_as_root() -> None:
    """It has the layers of all: its configuration, and the name of every file in a real container of it."""
    engine = Engine.connect()
    ref = pair(PROJECT, "scripted-tiny")[-1].rendered.ref
    image = engine.image(ref)
    assert image, "invoke build makes it"
    assert image.config["User"] == "10001:10001"
    assert not [name for line in image.config["Env"] if SECRET_NAME.search(name := line.partition("=")[0])]
    assert list(developer.secrets("config", json.dumps(image.config))) == []
    assert list(developer.secrets("history", json.dumps(engine.client.api.history(ref)))) == []
    command = ["-c", "find / -xdev -type f -o -xdev -type d"]
    found = output_of(engine, ref, command, entrypoint="sh", user="0")
    names = [line for line in found.splitlines() if line.rpartition("/")[2] in LEFT]
    assert [name for name in names if not name.startswith(("/proc", "/sys", "/dev"))] == [], "nothing left by a tool"
    assert len(found) > 10**6

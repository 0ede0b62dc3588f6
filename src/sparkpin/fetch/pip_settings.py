"""The indexes that the user's pip is configured for, for uv, which does not read pip's configuration, and for fetching.

As a program it runs a command with them: ./install.sh does so before .venv has any package, so this file and all that
it imports use the standard library alone.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from sparkpin.core.errors import HostError


def indexes(command: str = "download") -> dict[str, str]:
    """The environment for uv, with the indexes that the user's pip is configured for, unless uv is set up for one.

    A mirror or a folder of wheels that pip uses is meant for this, too. command: pip's, which has settings of its own.
    """
    if "UV_DEFAULT_INDEX" in os.environ:
        return dict(os.environ)
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    if done.returncode:  # rather than another index than the user's
        raise HostError(
            f"{sys.executable} has no working pip, which knows the package index: {done.stderr.strip()[-300:]}",
            next_step="install sparkpin again: pip is among what it depends on",
        )
    # By section, as their words weigh. pip 26 prints a file after the other, by path: /etc's, the user's, the .venv's.
    sections: dict[str, dict[str, str]] = {"global": {}, command: {}, ":env:": {}}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in sections:
            sections[section][name] = str(ast.literal_eval(value))
    found = sections["global"] | sections[command] | sections[":env:"]
    proxy, links = found.get("proxy", ""), found.get("find-links", "").split()
    links = [link if "://" in link else os.path.abspath(Path(link).expanduser()) for link in links]
    words = {
        "UV_SYSTEM_CERTS": "1",  # as pip does
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # pip prefers no index; hashes of the lock decide later
        "SSL_CERT_FILE": found.get("cert", ""),
        "UV_DEFAULT_INDEX": found.get("index-url", ""),
        "UV_INDEX": " ".join(found.get("extra-index-url", "").split()),
        "ALL_PROXY": f"http://{proxy}" if proxy and "://" not in proxy else proxy,
        "UV_FIND_LINKS": ",".join(links),
    }
    return {key: value for key, value in words.items() if value} | os.environ


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], indexes("install"))

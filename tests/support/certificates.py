"""Certificates that sign themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(path: Path, days: int = 2) -> tuple[str, str]:
    """PEM files of a certificate for 127.0.0.1, with a remark as some programs write it, and of its key. days: below 0
    for one that has expired."""
    cert, key, asked = (str(path.with_suffix(end)) for end in (".pem", ".key", ".csr"))
    for words in (
        f"req -newkey rsa:2048 -nodes -keyout {key} -out {asked} -subj /CN=x -addext subjectAltName=IP:127.0.0.1",
        f"x509 -req -in {asked} -signkey {key} -days {days} -out {cert} -copy_extensions copy",
    ):
        subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    Path(cert).write_text(f"friendlyName: Käse\n{Path(cert).read_text()}", encoding="utf-8")
    return cert, key

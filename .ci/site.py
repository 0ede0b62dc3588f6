"""Build the documents' site: `.venv/bin/python .ci/site.py`. A link, an anchor, a script or a picture that leads
nowhere is an error, and so is one of another site, since these pages are read without a network.

Exits with 1 where it found one, with 3 where mkdocs is not installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
ASSET = re.compile(r"""<(?:script|link|img)\b[^>]*?\b(?:src|href)=["']?([^"'> ]+)""")


def asset_faults(folder: Path) -> Iterator[str]:
    """Of a site's pages, but the one whose paths begin with a slash."""
    for page in folder.rglob("*.html"):
        for asset in ASSET.findall(page.read_text(encoding="utf-8")) if page.name != "404.html" else ():
            if not (page.parent / asset).is_file():
                yield f"the site's {asset} is not in it"


def main() -> int:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    if not mkdocs.exists():
        print("error: mkdocs is not installed, which builds the documents' site", file=sys.stderr)
        print(f"  next: {mkdocs.with_name('uv')} pip install --require-hashes -r .ci/docs.lock", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as folder:
        argv = [mkdocs, "build", "--config-file", ".ci/mkdocs.yml", "--site-dir", folder]
        env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement
        done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, env=env)
        lines = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
        lines += sorted(set(asset_faults(Path(folder))))
    print("\n".join(lines) or "the documents' site was built")
    return int(bool(done.returncode or lines))


if __name__ == "__main__":
    sys.exit(main())

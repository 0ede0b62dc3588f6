"""How a real Chromium shows the report on a phone. tests/unit/report looks at what it may load."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_samples import Made
from report_samples import made as made

from sparkpin.report.gather import gather
from sparkpin.report.page import html

pytestmark = pytest.mark.slow
PHONE = 390  # CSS pixels
LOOK = f"""<!doctype html><iframe src="page.html" style="width:{PHONE}px;height:800px;border:0"></iframe><script>
document.querySelector('iframe').onload = loaded => {{
  const page = loaded.target.contentDocument;
  page.querySelectorAll('details').forEach(one => one.open = true);
  document.title = page.documentElement.scrollWidth;
}};</script>"""


def width_of(page: str, folder: Path) -> int:
    """CSS pixels that a page takes in a window of a phone, with all that it folds unfolded."""
    program = shutil.which("chromium") or pytest.skip("no chromium (apt-get install chromium; tests/packages.txt)")
    folder.mkdir()
    (folder / "page.html").write_text(page)
    (folder / "look.html").write_text(LOOK)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
    local = ("--allow-file-access-from-files", "--virtual-time-budget=20000", f"--user-data-dir={folder}/profile")
    command = [program, *flags, *local, "--dump-dom", f"file://{folder}/look.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return int(re.findall(r"<title>(\d+)</title>", done.stdout)[0])


def test_a_phone_needs_no_scrolling_to_the_side(made: Made, tmp_path: Path) -> None:
    assert width_of(html(gather(made[0], None)), tmp_path / "report") == PHONE
    wide = "<!doctype html><title>wide</title><p style='width:900px'>wide"
    assert width_of(wide, tmp_path / "control") > PHONE, "what is too wide is seen"

"""A real Chromium, driven by its own command line: what it says of a page, and pictures of it.

`look_at`: a page of the same origin shows it in a frame of a width, reads it, and becomes its own result, which
--dump-dom prints. --log-net-log lists each request that the browser makes.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "chromium"
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-dev-shm-usage",
)
QUIET += ("--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync")
QUIET += ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr", "--log-level=0")
OWN = re.compile(r"https?://([a-z0-9-]+\.)*(google|googleapis)\.com/")
LOOK = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><script>
const luminance = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, at) => sum + v * [.2126, .7152, .0722][at], 0);
const rgb = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
const seen = ([r, g, b, a]) => a === undefined || a > .99;
function look(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, least = {};
  const told = [...page.querySelectorAll('body *')]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  for (const element of told) {
    if (!element.checkVisibility()) continue;
    const style = view.getComputedStyle(element), svg = element.namespaceURI.endsWith('svg');
    if (element.tagName === 'title' || element.tagName === 'TITLE') continue;
    let under = element, back = null;
    while (under && !back) {
      const colour = rgb(view.getComputedStyle(under).backgroundColor);
      back = seen(colour) ? colour : null; under = under.parentElement;
    }
    const pair = [rgb(svg ? style.fill : style.color), back || [255, 255, 255]].map(luminance).sort((a, b) => b - a);
    const ratio = (pair[0] + .05) / (pair[1] + .05);
    const name = element.tagName.toLowerCase() + '.' + (element.getAttribute('class') || '');
    least[name] = Math.min(least[name] || 21, ratio);
  }
  const wide = [...page.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > view.innerWidth + .5);
  const small = told.filter(e => e.checkVisibility() && e.tagName !== 'title').map(e => {
    const scale = e.ownerSVGElement ? e.getScreenCTM().a : 1;
    return parseFloat(view.getComputedStyle(e).fontSize) * scale;
  });
  return {width: view.innerWidth, scroll: page.documentElement.scrollWidth, contrast: least,
    wide: wide.map(e => e.tagName + '.' + e.getAttribute('class')), smallest: Math.min(...small),
    dark: view.matchMedia('(prefers-color-scheme: dark)').matches, text: page.body.innerText,
    background: view.getComputedStyle(page.body).backgroundColor,
    scripts: page.scripts.length, loaded: view.performance.getEntriesByType('resource').map(e => e.name)};
}
const wanted = JSON.parse(decodeURIComponent(location.hash.slice(1))), found = [];
for (const one of wanted) {
  const frame = document.createElement('iframe');
  frame.style.cssText = `border:0;height:800px;width:${one.width}px;color-scheme:${one.scheme}`;
  frame.src = one.path;
  frame.onload = () => {
    if (one.open) frame.contentDocument.querySelectorAll('details').forEach(e => e.open = true);
    found.push({...one, ...look(frame)});
    if (found.length === wanted.length) document.body.textContent = JSON.stringify(found);
  };
  document.body.append(frame);
}
</script>"""


@dataclass(frozen=True)
class Seen:
    """frames: what was found in each; said: lines of the console; urls: all that was asked for, but for what Chromium
    wants of its makers; base: where the pages lay."""

    frames: list[dict[str, Any]]
    said: list[str]
    urls: set[str]
    base: str

    def of(self, path: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["path"] == path]


@contextlib.contextmanager
def site(folder: Path) -> Iterator[str]:
    """A folder on 127.0.0.1."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Not here."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def chromium(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"no {PROGRAM} (apt-get install {PROGRAM}, as root; tests/packages.txt)")
    command = [program, *QUIET, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)


def look_at(pages: Mapping[str, str], folder: Path, wanted: Sequence[Mapping[str, Any]]) -> Seen:
    """pages: name -> HTML; wanted: of each frame the "path", "width" (CSS pixels), colour "scheme", and whether its
    <details> are "open"."""
    (folder / "site").mkdir(parents=True)
    for name, text in {**pages, "look.html": LOOK}.items():
        (folder / "site" / name).write_text(text)
    frames = json.dumps([{"open": False, **one} for one in wanted])
    log = folder / "net.json"
    with site(folder / "site") as base:
        done = chromium(
            folder / "profile",
            f"--log-net-log={log}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            f"{base}/look.html#{frames}",
        )
    text = re.search(r"<body>(\[.*\])</body>", done.stdout, re.S)
    assert text, done.stdout[-2000:] + done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    urls = set(re.findall(r'"url":"([^"]*)"', log.read_text()))
    return Seen(json.loads(html.unescape(text[1])), said, {url for url in urls if not OWN.match(url)}, base)

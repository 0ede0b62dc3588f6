"""A real Chromium, driven by its own command line: what it says of a page, and pictures of it.

`look_at`: a page of the same origin shows it in a frame of a width, reads it, and becomes its own result, which
--dump-dom prints. --log-net-log lists each request that the browser makes.

`driven`: clicks and screenshots, by the DevTools protocol through a pipe, as JSON that ends with a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import html
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class Driven:
    """A tab of a browser."""

    def __init__(self, ask: Callable[..., dict[str, Any]]) -> None:
        self.ask = ask

    def show(self, url: str, *, width: int = 1200, dark: bool = False, scale: float = 1) -> None:
        """Until it is loaded."""
        size = {"width": width, "height": 800, "deviceScaleFactor": scale, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=url)
        ready = "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        while self.run("location.href") != url:
            time.sleep(0.05)
        self.run(ready)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        made = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    def click(self, selector: str) -> None:
        """As a hand does: where its middle is on the screen."""
        box = f"(e => (e.scrollIntoView({{block: 'center'}}), e.getBoundingClientRect().toJSON()))({selector})"
        at = self.run(box)
        place = {"x": at["x"] + at["width"] / 2, "y": at["y"] + at["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, **place)

    def shot(self, height: int | None = None) -> bytes:
        """A PNG of the whole page, or of its top."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "scale": 1, "width": size["width"], "height": height or size["height"]}
        made = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(made["data"])

    def pixels(self, png: bytes) -> dict[str, Any]:
        """Of a screenshot: its width, the shares of its light and dark pixels, and whether its last columns are of one
        colour. The browser decodes it, on a page of no site."""
        self.show("about:blank")
        found: dict[str, Any] = self.run(PIXELS.replace("PNG", base64.b64encode(png).decode()))
        return found


PIXELS = """(async () => {
  const image = new Image(); image.src = 'data:image/png;base64,PNG'; await image.decode();
  const {width, height} = image, canvas = new OffscreenCanvas(width, height), pen = canvas.getContext('2d');
  pen.drawImage(image, 0, 0);
  const {data} = pen.getImageData(0, 0, width, height), edge = new Set();
  let light = 0, dark = 0;
  for (let at = 0; at < data.length; at += 4) {
    const shade = (data[at] + data[at + 1] + data[at + 2]) / 765;
    light += shade > .75; dark += shade < .25;
    if (at / 4 % width >= width - 8) edge.add(`${data[at]},${data[at + 1]},${data[at + 2]}`);
  }
  return {width, light: light / width / height, dark: dark / width / height, edge: [...edge]};
})()"""


@contextlib.contextmanager
def driven(folder: Path) -> Iterator[Driven]:
    """folder: is made, for the browser's profile and what it says."""
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"no {PROGRAM} (apt-get install {PROGRAM}, as root; tests/packages.txt)")
    folder.mkdir(parents=True)
    told, tell = os.pipe()
    heard, hear = os.pipe()
    # It reads 3 and writes 4, which are somebody else's here, maybe.
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (told, hear)]
    actions = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
    log = (os.POSIX_SPAWN_OPEN, 2, str(folder / "stderr"), os.O_WRONLY | os.O_CREAT, 0o600)
    line = [program, *QUIET, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
    child = os.posix_spawn(program, line, os.environ, file_actions=[*actions, log], setsid=True)
    for one in (told, hear, *high):
        os.close(one)
    count = itertools.count(1)
    rest = bytearray()
    with open(tell, "wb", buffering=0) as into, open(heard, "rb"):

        def ask(method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
            number = next(count)
            message = {"id": number, "method": method, "params": parameters}
            into.write(json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
            while True:
                while b"\0" not in rest:
                    got = os.read(heard, 1 << 20)
                    assert got, (folder / "stderr").read_text()[-2000:]
                    rest.extend(got)
                text, _, left = rest.partition(b"\0")
                rest[:] = left
                answer = json.loads(text)
                if answer.get("id") == number:
                    assert "error" not in answer, (method, answer["error"])
                    return dict(answer["result"])

        try:
            tab = ask("Target.createTarget", url="about:blank")["targetId"]
            session = ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
            ask("Browser.grantPermissions", permissions=["clipboardReadWrite"])
            yield Driven(partial(ask, session=session))
            ask("Browser.close")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def picture(page: Path, target: Path, *, width: int, height: int | None = None, dark: bool = False) -> None:
    """A screenshot: python tests/support/browser.py PAGE TARGET WIDTH [HEIGHT] [dark]."""
    with tempfile.TemporaryDirectory() as folder, driven(Path(folder) / "browser") as tab:
        tab.show(page.absolute().as_uri(), width=width, dark=dark)
        target.write_bytes(tab.shot(height))


if __name__ == "__main__":
    import sys

    _, page, target, width, *rest = sys.argv
    heights = [int(word) for word in rest if word.isdecimal()]
    picture(Path(page), Path(target), width=int(width), height=next(iter(heights), None), dark="dark" in rest)

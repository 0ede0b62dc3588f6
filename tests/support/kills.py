"""Commands whose process group is killed (SIGKILL) at moments that a seed chooses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkout import INVOKE
from places import PROJECT

SPARKPIN = Path(INVOKE[0]).with_name("sparkpin")


@dataclass
class Victim:
    """A line of sparkpin. env: more than this process has; seconds: within which it is killed, 0 for what it takes."""

    line: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0

    def start(self, out: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(PROJECT / "src"), **self.env}
        return subprocess.Popen(
            [SPARKPIN, *self.line], cwd=PROJECT, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )

    def done(self) -> str:
        """Its output. Nobody kills it, and it has to succeed."""
        begin, process = time.monotonic(), self.start(subprocess.PIPE)
        out = process.communicate()[0].decode(errors="replace")
        assert process.returncode == 0, f"{self.line}: {process.returncode}: {out}"
        self.seconds = self.seconds or time.monotonic() - begin
        return out

    def kills(self, count: int, before: Callable[[], object] = lambda: None) -> Iterator[int]:
        """After each kill its number. before: is called before each start."""
        chance, number = random.Random(self.line[0]), 0
        while number < count:
            before()
            process = self.start(subprocess.DEVNULL)
            time.sleep(chance.uniform(0.15, 1.0) * self.seconds)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                number += 1
                yield number
            else:
                assert process.returncode == 0, f"{self.line}: {process.returncode}"
                self.seconds *= 0.9  # the machine is less busy than it was

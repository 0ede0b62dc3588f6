"""Measure a release: its image serves its checkpoint, one server at a time, and only for what nobody has kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build.make import checkpoint_of
from sparkpin.core import files
from sparkpin.core.errors import InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import Engine
from sparkpin.measure.quality import asking, measured, skills, standard
from sparkpin.measure.quality.measured import QualityMeasured, Reading, SkillAnswer
from sparkpin.measure.quality.standard import Score
from sparkpin.measure.quality.texts import Corpus
from sparkpin.pins.vllm_command import served_name
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve import memory_limit, socket_port
from sparkpin.serve.choose_loader import with_loader
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.client import Client
from sparkpin.smoke.replies import Fault
from sparkpin.smoke.run import subject_of
from sparkpin.smoke.server import WAITING, StartFault, remove_leftovers, smoke_lock, started
from sparkpin.smoke.subject import SmokeSubject

REQUEST_SECONDS = 600.0  # a long prompt's prefill on a slow machine
LM_EVAL_SECONDS = 3600.0 * standard.HOURS
KEPT = 64 << 20  # bytes: more than the log-probabilities of all texts ever took


@dataclass(frozen=True)
class QualityPlan:
    """What to measure of each release. limit: seconds that the standard tasks may take."""

    corpus: Corpus
    standard: standard.StandardTasks | None = None
    limit: float = LM_EVAL_SECONDS

    def folder(self, paths: Paths, release: Release) -> Path:
        what = {"corpus": self.corpus.digest, "top": asking.TOP, "continued": asking.CONTINUED, "most": asking.MOST}
        return measured.place(paths, release, what)

    def scores_path(self, paths: Paths, release: Release) -> Path | None:
        if self.standard is None:
            return None
        return measured.place(paths, release, standard.asked(self.standard)).with_suffix(".json")

    def scores_of(self, paths: Paths, release: Release) -> tuple[Score, ...] | None:
        """Those that are kept; none where none are wanted, None where they have to be measured."""
        path = self.scores_path(paths, release)
        return standard.known(path) if path else ()


def measure(
    paths: Paths, engine: Engine, release: Release, plan: QualityPlan, say: Say
) -> tuple[QualityMeasured, tuple[Score, ...]]:
    """From the cache as far as it goes, else from a server; with the scores of the standard tasks.

    Raises:
        DiskError: what is measured would not fit on the disk.
        HostError: the release's memory plan needs more than is free.
        InputError: no server of the release can run on this machine; the standard tasks lack their data.
        SmokeError: the server does not start, dies, or gives no log-probabilities.
    """
    folder, scores_path = plan.folder(paths, release), plan.scores_path(paths, release)
    known = measured.known(folder)
    scores = plan.scores_of(paths, release)
    if known and scores is not None:
        say(f"{release.tag}: measured before")
        return known, scores
    if why := obstacle(paths, engine, release):
        raise InputError(
            f"{release.tag} cannot be asked here: {why}",
            next_step="run this where its server can run (invoke export takes the release there)",
        )
    gpus = uses_gpu(paths, release)
    checkpoint = checkpoint_of(paths, release)
    running.require_readable(checkpoint)
    running.require_image(engine, release)
    files.require_space(paths.cache, KEPT, "the measurements", "SPARKPIN_CACHE")
    tuned = with_loader(paths, release, checkpoint, say, gpus=gpus)
    with files.lock(smoke_lock(paths), on_wait=lambda: say(WAITING)):
        remove_leftovers(paths, engine, say)
        timeout = running.ready_timeout(checkpoint)
        if gpus:  # another server ended a moment ago, and its files may still count as taken
            memory_limit.drop_page_cache(say)
            memory_limit.require_room(memory_limit.room_for(paths, engine, release, checkpoint), release)
        say(f"{release.tag}: starting its server")
        with (
            started(paths, engine, tuned, checkpoint, gpus=gpus, timeout=timeout, say=say) as server,
            Client.unix(server.socket, timeout=REQUEST_SECONDS) as client,
        ):
            try:
                server.wait_ready(client)
                if known is None:
                    known = asked_all(subject_of(tuned, client, server, 0), plan.corpus, say)
                    # Else what it was asked after its end would be kept as wrong answers. An engine that is gone may
                    # leave a container that runs for some seconds more.
                    if server.exit_reason() or not any(client.healthy() for _ in range(3)):
                        raise Fault("the server ended amid the questions")
                    measured.keep(folder, known)
                if scores is None and scores_path and plan.standard:
                    with socket_port.listening(server.socket) as port:
                        where = standard.Served(port, served_name(tuned.argv), checkpoint, asking.room(client))
                        scores = standard.scores(paths, plan.standard, where, limit=plan.limit, say=say)
                    standard.keep(scores_path, scores)
            except StartFault as fault:
                raise SmokeError(f"{release.tag}: {fault}", next_step=f"invoke smoke {release.tag}") from None
            except (Wrong, Fault) as fault:
                died = f"; the container {reason}" if (reason := server.exit_reason(wait=2)) else ""
                raise SmokeError(
                    f"{release.tag}: {fault}{died}\n{running.last_lines(server.log()) if died else ''}".rstrip(),
                    next_step=f"invoke smoke {release.tag} says what its server does and does not do",
                ) from None
    return known, scores or ()


def asked_all(subject: SmokeSubject, corpus: Corpus, say: Say) -> QualityMeasured:
    """Wrong or Fault where the server gives no log-probabilities; a wrong answer to a question is a result."""
    begin, notes = time.monotonic(), list[str]()
    version = asking.version(subject.client)
    readings = read(subject, corpus, say, notes)
    asked = questions(subject, corpus, say, notes)
    subject.client.exchanges.clear()  # megabytes of log-probabilities; what they say is kept
    return QualityMeasured(version, round(time.monotonic() - begin, 1), readings, asked, tuple(notes))


def read(subject: SmokeSubject, corpus: Corpus, say: Say, notes: list[str]) -> tuple[Reading, ...]:
    limit = asking.room(subject.client)
    most = min(asking.MOST, limit - asking.CONTINUED)
    if most < 2:
        raise Wrong(f"max_model_len {limit} leaves no room for a text and {asking.CONTINUED} tokens after it")
    # A first answer may come from kernels that are still being tuned, and one more request is cheap.
    asking.reading(subject.client, subject.model, corpus.texts[0], min(most, 64))
    found = []
    for number, text in enumerate(corpus.texts, start=1):
        found.append(asking.reading(subject.client, subject.model, text, most))
        say(f"text {number} of {len(corpus.texts)}: {text.name}, {len(found[-1].forced) + 1} tokens")
    if cut := sum(len(reading.forced) + 1 == most for reading in found):
        notes.append(f"{cut} of {len(found)} texts were read up to {most} tokens")
    return tuple(found)


def questions(subject: SmokeSubject, corpus: Corpus, say: Say, notes: list[str]) -> tuple[SkillAnswer, ...]:
    """The scripted model knows its own questions alone."""
    known = subject.expect.chat.exact
    tools = skills.tool_questions(subject, () if known else corpus.questions, quick=corpus.quick)
    found = []
    for number, (name, case, ask) in enumerate(tools, start=1):
        found.append(skills.asked(skills.TOOL_CALLS, name, case, ask))
        say(f"tool call {number} of {len(tools)}: {name}: {'right' if found[-1].right else 'wrong'}")
    steps = skills.needle_steps(subject, quick=corpus.quick)
    if not steps:
        notes.append("no needles: --max-model-len leaves no room for a long prompt")
    for step in steps:
        words = list(skills.needles(subject, (step,)))
        say(f"needles, {step:,} tokens: {sum(one.right for one in words)} of {len(words)} found")
        found += words
    return tuple(found)

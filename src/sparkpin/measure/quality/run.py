"""Measure a release: its image serves its checkpoint, one server at a time, and only for what nobody has kept."""

from __future__ import annotations

import time
from pathlib import Path

from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.measure.own_server import own_server
from sparkpin.measure.quality import asking, measured, skills
from sparkpin.measure.quality.measured import QualityMeasured, Reading, SkillAnswer
from sparkpin.measure.quality.texts import Corpus
from sparkpin.releases.record import Release
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.expectations import expectations_of
from sparkpin.smoke.run import subject_of
from sparkpin.smoke.subject import SmokeSubject

KEPT = 64 << 20  # bytes: more than the log-probabilities of all texts ever took


def folder_of(paths: Paths, release: Release, corpus: Corpus) -> Path:
    """Of what is asked of the release. Answers to other questions are kept elsewhere."""
    what = {"corpus": corpus.digest, "top": asking.TOP, "continued": asking.CONTINUED, "most": asking.MOST}
    what["questions"] = skills.digest(expectations_of(release.demands))
    return measured.place(paths, release, what)


def measure(paths: Paths, engine: Engine, release: Release, corpus: Corpus) -> QualityMeasured:
    """From the cache as far as it goes, else from a server.

    Raises:
        DiskError: what is measured would not fit on the disk.
        HostError: the release's memory plan needs more than is free.
        InputError: no server of the release can run on this machine.
        SmokeError: the server does not start, dies, or gives no log-probabilities.
    """
    folder = folder_of(paths, release, corpus)
    if known := measured.known(folder):
        say(f"{release.tag}: measured before")
        return known
    with own_server(paths, engine, release, KEPT) as own:
        found = asked_all(subject_of(own.release, own.client, own.server), corpus)
        own.require_alive()  # else what it was asked after its end would be kept as wrong answers
        measured.keep(folder, found)
    return found


def asked_all(subject: SmokeSubject, corpus: Corpus) -> QualityMeasured:
    """Wrong or Fault where the server gives no log-probabilities; a wrong answer to a question is a result."""
    begin, notes = time.monotonic(), list[str]()
    version = asking.version(subject.client)
    readings = read(subject, corpus, notes)
    asked = questions(subject, corpus, notes)
    subject.client.exchanges.clear()  # megabytes of log-probabilities; what they say is kept
    return QualityMeasured(version, round(time.monotonic() - begin, 1), readings, asked, tuple(notes))


def read(subject: SmokeSubject, corpus: Corpus, notes: list[str]) -> tuple[Reading, ...]:
    limit = asking.room(subject.client)
    most = min(asking.MOST, limit - asking.CONTINUED)
    if most < 2:
        raise Wrong(f"max_model_len {limit} leaves no room for a text and {asking.CONTINUED} tokens after it")
    # A first answer may come from kernels that are still being tuned, and one more request is cheap.
    with waiting("a first answer"):
        asking.reading(subject.client, subject.model, corpus.texts[0], min(most, 64))
    found = []
    for number, text in enumerate(corpus.texts, start=1):
        with waiting(f"reading text {number}"):
            found.append(asking.reading(subject.client, subject.model, text, most))
        say(f"text {number} of {len(corpus.texts)}: {text.name}, {len(found[-1].forced) + 1} tokens")
    if cut := sum(len(reading.forced) + 1 == most for reading in found):
        notes.append(f"{cut} of {len(found)} texts were read up to {most} tokens")
    return tuple(found)


def questions(subject: SmokeSubject, corpus: Corpus, notes: list[str]) -> tuple[SkillAnswer, ...]:
    """The scripted model knows its own questions alone."""
    known = subject.expect.cases["chat"].exact
    tools = skills.tool_questions(subject, () if known else corpus.questions, quick=corpus.quick)
    found = []
    for number, (name, case, ask) in enumerate(tools, start=1):
        found.append(skills.asked(skills.TOOL_CALLS, name, case, ask))
        say(f"tool call {number} of {len(tools)}: {name}: {'right' if found[-1].right else 'wrong'}")
    steps = skills.needle_steps(subject, quick=corpus.quick)
    if not steps:
        notes.append("no needles: --max-model-len leaves no room for a long prompt")
    for step in steps:
        with waiting(f"needles, {step:,} tokens"):
            words = list(skills.needles(subject, (step,)))
        say(f"needles, {step:,} tokens: {sum(one.right for one in words)} of {len(words)} found")
        found += words
    return tuple(found)

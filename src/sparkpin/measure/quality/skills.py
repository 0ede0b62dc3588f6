"""Questions with a right answer: calls of tools, and words that are found again in long prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from sparkpin.measure.quality.measured import SkillAnswer
from sparkpin.measure.quality.texts import Question
from sparkpin.smoke.answers import Answer, Wrong, judge
from sparkpin.smoke.checks import STEPS, longest_prompt
from sparkpin.smoke.expectations import Case, Expectations, said, table
from sparkpin.smoke.replies import BadStream, Fault
from sparkpin.smoke.subject import SmokeSubject

TOOL_CALLS = "tool calls"
NEEDLES = "needles"
LONGEST_NAME = 60  # characters of a question that stand for it
LEAST_ROOM = 256  # tokens of a prompt in which finding something says anything


def of_the_smoke_test(expect: Expectations) -> tuple[tuple[str, Case], ...]:
    return (
        ("one call", expect.cases["tool-call"]),
        ("two calls", expect.cases["tool-calls-parallel"]),
        ("long arguments", expect.cases["tool-call-long"]),
        ("while it thinks", expect.cases["tool-call-in-reasoning"]),
        ("examples above", expect.cases["tool-examples"]),
    )


def digest(expect: Expectations) -> str:
    """SHA-256 of what is asked of a model beside the questions of `texts/`: answers to others are not comparable."""
    cases = [*(case for _, case in of_the_smoke_test(expect)), *expect.recall(STEPS[0])]
    told = [[case.request, case.calls, case.holds, case.content] for case in cases]
    return hashlib.sha256(json.dumps([told, STEPS, table().requests["roomy"]], sort_keys=True).encode()).hexdigest()


def tool_questions(
    subject: SmokeSubject, questions: tuple[Question, ...], *, quick: bool
) -> list[tuple[str, Case, Callable[[Case], Answer]]]:
    """Name, request and way of each: streamed, as agents ask; those of the smoke test in one piece, too."""

    def streamed(case: Case) -> Answer:
        return subject.streamed(case)[0]

    expect = subject.expect
    found: list[tuple[str, Case, Callable[[Case], Answer]]] = []
    for name, case in of_the_smoke_test(expect):
        found.append((f"{name}, streamed", fitted(subject, case), streamed))
        if not quick:
            found.append((name, fitted(subject, case), subject.chat))
    for one in questions:
        request = said(one.ask) | {"tools": list(one.tools), "tool_choice": "auto"} | table().requests["roomy"]
        case = Case(request, calls=tuple((name, None) for name in one.calls) or None, holds=one.holds)
        name = one.ask if len(one.ask) <= LONGEST_NAME else f"{one.ask[: LONGEST_NAME - 3]}..."
        found.append((name, fitted(subject, case), streamed))
    return found


def fitted(subject: SmokeSubject, case: Case) -> Case:
    """A server refuses a request that could grow longer than its model may be: half of that is for the answer."""
    limit = subject.max_model_len
    if limit is None or int(case.request["max_tokens"]) <= limit // 2:
        return case
    return replace(case, request=case.request | {"max_tokens": limit // 2})


def asked(skill: str, name: str, case: Case, ask: Callable[[Case], Answer]) -> SkillAnswer:
    """Whatever the server does wrong is a wrong answer."""
    try:
        answer = ask(case)
        judge(case, answer)
    except (Wrong, Fault, BadStream) as wrong:
        return SkillAnswer(skill, name, False, str(wrong)[:300])
    return SkillAnswer(skill, name, True)


def needle_steps(subject: SmokeSubject, *, quick: bool) -> tuple[int, ...]:
    """Lengths of prompts, as far as the recipe allows; where the first does not fit, one of what does."""
    room = longest_prompt(subject, fitted(subject, subject.expect.recall(64)[0]))
    steps = tuple(step for step in STEPS if step <= room) or ((room,) if room >= LEAST_ROOM else ())
    return steps[:1] if quick else steps


def needles(subject: SmokeSubject, steps: tuple[int, ...]) -> Iterator[SkillAnswer]:
    """Each word that must be found counts; a scripted model finds one thing in each of its prompts, or another."""
    for step in steps:
        skill = f"{NEEDLES}, {step:,} tokens"
        for number, case in enumerate(subject.expect.recall(step), start=1):
            case = fitted(subject, case)
            if case.exact:
                yield asked(skill, f"{step:,} tokens, prompt {number}", case, subject.chat)
                continue
            try:
                content, fault = subject.chat(case).content, ""
            except (Wrong, Fault) as wrong:
                content, fault = "", str(wrong)[:300]
            for word in case.holds:
                found = word in content
                detail = "" if found else fault or f"not in {content[:120]!r}"
                yield SkillAnswer(skill, f"{step:,} tokens, {word}", found, detail)

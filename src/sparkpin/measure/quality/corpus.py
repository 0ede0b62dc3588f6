"""What is asked: the texts and questions of `texts/` (SOURCES.md there says where they come from), calls of tools, and
words that are found again in long prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sparkpin.smoke.answers import Answer, Wrong, judge
from sparkpin.smoke.checks import STEPS, longest_prompt
from sparkpin.smoke.client import Fault
from sparkpin.smoke.expectations import Case, Expectations, chat_request, table
from sparkpin.smoke.subject import SmokeSubject

FOLDER = Path(__file__).parent / "texts"
QUICK = 2  # texts of each kind
TOOL_CALLS = "tool calls"
TOOL_CASES = ("tool-call", "tool-calls-parallel", "tool-call-long", "tool-call-in-reasoning", "tool-examples")
NEEDLES = "needles"
LONGEST_NAME = 60  # characters of a question that stand for it
LEAST_ROOM = 256  # tokens of a prompt in which finding something says anything


@dataclass(frozen=True)
class CorpusText:
    kind: str  # the folder
    name: str  # kind/file
    text: str


Question = tuple[str, Case]  # how it is called, and what is asked


@dataclass(frozen=True)
class Corpus:
    """quick: two texts of each kind, and fewer questions: says little, and soon."""

    texts: tuple[CorpusText, ...]
    questions: tuple[Question, ...]
    quick: bool = False

    def digest(self, expect: Expectations | None = None) -> str:
        """SHA-256 over texts and questions; with those of the smoke test where a model is known."""
        cases = [case for _, case in self.questions]
        if expect:
            cases += [*(case for _, case in of_the_smoke_test(expect)), *expect.recall(STEPS[0])]
        asked = [[case.request, case.calls, case.holds, case.content] for case in cases]
        texts = [[text.name, text.text] for text in self.texts]
        content = texts, asked, self.quick, STEPS, table()["requests"]["roomy"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class SkillAnswer:
    """To a question with a right answer."""

    skill: str  # "tool calls", or "needles, <n> tokens"
    name: str
    right: bool
    detail: str = ""  # what was wrong


def load(*, quick: bool = False) -> Corpus:
    found = []
    for folder in sorted(folder for folder in FOLDER.iterdir() if folder.is_dir()):
        for file in sorted(folder.glob("*.txt"))[: QUICK if quick else None]:
            text = file.read_text(encoding="utf-8")
            found.append(CorpusText(folder.name, f"{folder.name}/{file.stem}", text))
    return Corpus(tuple(found), () if quick else questions(), quick)


def questions() -> tuple[Question, ...]:
    """Of texts/questions.json: `calls`, the tools that must be called, none for an answer in words; `holds`, what their
    arguments must hold."""
    value = json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))
    tools = {tool["function"]["name"]: tool for tool in value["tools"]}
    found = []
    for one in value["questions"]:
        request = chat_request(one["ask"]) | {"tools": [tools[name] for name in one["tools"]], "tool_choice": "auto"}
        request |= table()["requests"]["roomy"]
        calls = tuple((name, None) for name in one["calls"]) or None
        found.append((one["ask"][:LONGEST_NAME], Case(request, calls=calls, holds=tuple(one.get("holds", ())))))
    return tuple(found)


def of_the_smoke_test(expect: Expectations) -> tuple[Question, ...]:
    return tuple((name.replace("-", " "), expect.cases[name]) for name in TOOL_CASES)


def ask_tools(subject: SmokeSubject, corpus: Corpus) -> Iterator[SkillAnswer]:
    """Streamed, as agents ask; those of the smoke test also in one piece. A scripted model knows these alone."""
    known = of_the_smoke_test(subject.expect)
    others = () if subject.expect.cases["chat"].exact else corpus.questions
    for name, case in (*known, *others):
        yield answered(TOOL_CALLS, f"{name}, streamed", fitted(subject, case), lambda case: subject.streamed(case)[0])
    for name, case in () if corpus.quick else known:
        yield answered(TOOL_CALLS, name, fitted(subject, case), subject.chat)


def fitted(subject: SmokeSubject, case: Case) -> Case:
    """A server refuses a request that could grow longer than its model may be: half of that is for the answer."""
    limit = subject.max_model_len
    if limit is None or int(case.request["max_tokens"]) <= limit // 2:
        return case
    return replace(case, request=case.request | {"max_tokens": limit // 2})


def answered(skill: str, name: str, case: Case, ask: Callable[[Case], Answer]) -> SkillAnswer:
    """Whatever the server does wrong is a wrong answer."""
    try:
        answer = ask(case)
        judge(case, answer)
    except (Wrong, Fault) as wrong:
        return SkillAnswer(skill, name, False, str(wrong)[:300])
    return SkillAnswer(skill, name, True)


def ask_needles(subject: SmokeSubject, *, quick: bool) -> Iterator[SkillAnswer]:
    """In prompts as long as the recipe allows; where the first length does not fit, in one of what does.

    Each word that must be found counts; a scripted model finds one thing in each of its prompts, or another.
    """
    room = longest_prompt(subject, fitted(subject, subject.expect.recall(64)[0]))
    steps = [step for step in STEPS if step <= room] or ([room] if room >= LEAST_ROOM else [])
    for step in steps[:1] if quick else steps:
        skill = f"{NEEDLES}, {step:,} tokens"
        for number, each in enumerate(subject.expect.recall(step), start=1):
            case = fitted(subject, each)
            if case.exact:
                yield answered(skill, f"{step:,} tokens, prompt {number}", case, subject.chat)
                continue
            try:
                content, fault = subject.chat(case).content, ""
            except (Wrong, Fault) as wrong:
                content, fault = "", str(wrong)[:300]
            for word in case.holds:
                found = word in content
                detail = "" if found else fault or f"not in {content[:120]!r}"
                yield SkillAnswer(skill, f"{step:,} tokens, {word}", found, detail)

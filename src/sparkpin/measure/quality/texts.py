"""The texts and questions that are shipped in `texts/` (SOURCES.md there says where they come from)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "texts"
QUESTIONS = FOLDER / "questions.json"
QUICK = 2  # texts of each kind


@dataclass(frozen=True)
class CorpusText:
    kind: str  # the folder
    name: str  # kind/file
    text: str


@dataclass(frozen=True)
class Question:
    ask: str
    tools: tuple[Mapping[str, Any], ...]
    calls: tuple[str, ...]  # the tools that must be called, none: an answer in words
    holds: tuple[str, ...]  # what their arguments must hold


@dataclass(frozen=True)
class Corpus:
    """quick: two texts of each kind, and fewer questions: says little, and soon."""

    texts: tuple[CorpusText, ...]
    questions: tuple[Question, ...]
    quick: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 over texts and questions."""
        questions = QUESTIONS.read_text(encoding="utf-8") if self.questions else ""
        texts = [(text.name, hashlib.sha256(text.text.encode()).hexdigest()) for text in self.texts]
        said = [texts, questions, self.quick]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def load(*, quick: bool = False) -> Corpus:
    found = []
    for folder in sorted(folder for folder in FOLDER.iterdir() if folder.is_dir()):
        for file in sorted(folder.glob("*.txt"))[: QUICK if quick else None]:
            text = file.read_text(encoding="utf-8")
            found.append(CorpusText(folder.name, f"{folder.name}/{file.stem}", text))
    return Corpus(tuple(found), () if quick else questions(), quick)


def questions() -> tuple[Question, ...]:
    value = json.loads(QUESTIONS.read_text(encoding="utf-8"))
    tools = {tool["function"]["name"]: tool for tool in value["tools"]}
    return tuple(
        Question(
            one["ask"], tuple(tools[name] for name in one["tools"]), tuple(one["calls"]), tuple(one.get("holds", ()))
        )
        for one in value["questions"]
    )

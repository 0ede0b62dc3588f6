"""The scripted model's byte-level vocabulary, and which token follows which.

Every position of every script has a token of its own, so that the model needs to know only the last token and, at the
few tokens that scripts share, the mode. All 256 bytes are tokens too: any text can be encoded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.scripted_tiny.scripts import COMPLETION, MODES, Script, trigger

END = "<|im_end|>"
PAD = "<|endoftext|>"
THINK_END = "</think>"
RECALL = "<|scripted_recall|>"
"""Ends a prompt whose script is chosen further up, by a trigger in what the user says: attention has to find it."""
BLANK = "\n\n"
CALL, CALL_END = "<tool_call>", "</tool_call>"
MARKUP = ("<think>", THINK_END, CALL, CALL_END)
"""Tokens that parsers of a server look up by name. Not "special": they stay in the decoded text."""

_PIECE = re.compile(rb"\s*\S{1,6}|\s+")
_MARKUP_SPLIT = re.compile("(" + "|".join(map(re.escape, MARKUP)) + ")")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``tokens[i]`` is the bytes of token i; the last ``len(added)`` ones are ``added`` tokens (matched before BPE)."""

    tokens: tuple[bytes, ...]
    added: tuple[str, ...]
    chains: Mapping[str, tuple[int, ...]]
    """Token ids of each script by mode, with thinking, without the end token."""

    def id_of(self, text: str) -> int:
        return self.tokens.index(text.encode())

    @property
    def first_added(self) -> int:
        return len(self.tokens) - len(self.added)

    def decode(self, ids: tuple[int, ...]) -> str:
        return b"".join(self.tokens[i] for i in ids).decode()


@functools.cache
def vocabulary() -> Vocabulary:
    texts = [bytes([value]) for value in range(256)] + [BLANK.encode()]
    triggers = (trigger(script.mode, direct=direct) for script in MODES for direct in (False, True))
    added = (PAD, "<|im_start|>", END, *MARKUP, *triggers, RECALL)
    used = set(texts)
    parts: dict[str, list[bytes]] = {}
    for script in (COMPLETION, *MODES):
        parts[script.mode] = list(_script_pieces(script, used))
        texts += [piece for piece in parts[script.mode] if piece.decode(errors="replace") not in (*added, BLANK)]
    texts += [token.encode() for token in added]
    ids = {text: i for i, text in enumerate(texts)}
    return Vocabulary(tuple(texts), added, {mode: tuple(ids[p] for p in pieces) for mode, pieces in parts.items()})


def _script_pieces(script: Script, used: set[bytes]) -> Iterator[bytes]:
    if script.reasoning is not None:
        yield from _new_pieces(script.reasoning.encode(), used)
        if not script.open:
            yield THINK_END.encode()
            yield BLANK.encode()
    yield from _content_pieces(script.content, used)


def _content_pieces(content: str, used: set[bytes]) -> Iterator[bytes]:
    """A call's first tag and its last are tokens of their own. Those between are spelled: what follows them depends on
    which of two calls they belong to, and the last token alone would not tell.
    """
    parts = _MARKUP_SPLIT.split(content)
    opening = parts.index(CALL) if CALL in parts else -1
    closing = len(parts) - 1 - parts[::-1].index(CALL_END) if CALL_END in parts else -1
    text = ""
    for place, part in enumerate(parts):
        if place not in (opening, closing):
            text += part
            continue
        if text:
            yield from _new_pieces(text.encode(), used)
        yield part.encode()
        text = ""
    if text:
        yield from _new_pieces(text.encode(), used)


def _new_pieces(text: bytes, used: set[bytes]) -> list[bytes]:
    """Cut text into pieces that no script has yet, as short as that allows. Cuts may fall inside a UTF-8 character."""
    pieces: list[bytes] = []
    rest = b""
    for match in _PIECE.findall(text):
        rest += match
        if rest not in used:
            pieces.append(rest)
            used.add(rest)
            rest = b""
    if rest:
        last = rest
        while last in used or last is rest:
            if not pieces:
                raise ValueError(f"scripts are too alike: {last!r} ends two of them")
            last = pieces.pop() + last
        pieces.append(last)
        used.add(last)
    return pieces

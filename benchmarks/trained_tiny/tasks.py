"""Made-up tasks that can be solved from the context alone: words that are found again, copies, calls of tools, talk.

A task is a list of pieces: text or tokens, and whether they are the answer. All are drawn from a seed. None of the
words, tools or questions of `invoke quality` is in here but the weather, which every model is asked.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Piece = tuple[str | np.ndarray, bool]
OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
THOUGHT = "<think>\n\n</think>\n\n"
NUMBERS = ("no", "one", "two", "three", "four")
NAMES = str.split(
    "Ada Ali Anna Ayşe Bora Carl Deniz Ece Emma Finn Gül Hans Ines Jan Kaan Lena Maya Nil Omar Paul Rosa Selim"
)
PLACES = str.split(
    "Ankara İstanbul İzmir Bursa Adana Konya Antalya Samsun Van Kars Rize Sinop Muğla Bolu Edirne Mersin Paris London "
    "Berlin Rome Madrid Oslo Vienna Athens Lisbon Dublin Cairo Tokyo Delhi Lima Quito Boston Denver Iğdır Ağrı Şırnak"
)
NOUNS = str.split(
    "gate door box drawer safe room file server key cabin boat garden kitchen tower bridge cellar station market shop "
    "house garage locker shelf desk chest barn mill library office school harbour field cave island"
)
KINDS = str.split("north south east west red blue green white old new small big first second third upper lower inner")
SYLLABLES = str.split(
    "ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni ra re ri ro sa se si so ta te ti to va ve vi ya yu za ze zi "
    "kan mer yak tor bel sim dar gon fer lis pan rud sol tem ver win yol şa çi ğı öz üm"
)


def word(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.7:
        return "".join(chance.choice(SYLLABLES) for _ in range(chance.randint(2, 4)))
    if kind < 0.85:
        return "".join(chance.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(chance.randint(4, 8)))
    return str(chance.randrange(10, 100_000))


def talk(*turns: tuple[str, str], tools: Sequence[Any] = (), system: str = "") -> list[Piece]:
    """As chat_template.jinja writes it. Role "assistant" answers; the last turn alone has a place for thoughts."""
    head = ""
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        head = f"# Tools\n\nYou have access to the following functions:\n\n<tools>{listed}\n</tools>"
    head = "\n\n".join(part for part in (head, system) if part)
    pieces: list[Piece] = [(f"{OPEN}system\n{head}{CLOSE}\n", False)] if head else []
    for number, (role, said) in enumerate(turns):
        if role != "assistant":
            said = f"<tool_response>\n{said}\n</tool_response>" if role == "tool" else said
            pieces.append((f"{OPEN}user\n{said}{CLOSE}\n", False))
        else:
            pieces.append((f"{OPEN}assistant\n" + (THOUGHT if number == len(turns) - 1 else ""), False))
            pieces += [(said + CLOSE, True), ("\n", False)]
    return pieces


def spread(chance: random.Random, filler: np.ndarray, lines: Sequence[str]) -> list[Piece]:
    """The lines at random places of the filler."""
    cuts = sorted(chance.randrange(len(filler) + 1) for _ in lines)
    pieces: list[Piece] = []
    for begin, end, line in zip([0, *cuts], cuts, lines, strict=False):
        pieces += [(filler[begin:end], False), (f"\n{line}\n", False)]
    return [*pieces, (filler[cuts[-1] :], False)]


def asked(before: list[Piece], question: str, answer: str) -> list[Piece]:
    return [
        (f"{OPEN}user\n", False), *before, (f"\n{question}{CLOSE}\n{OPEN}assistant\n{THOUGHT}", False),
        (answer + CLOSE, True), ("\n", False),
    ]  # fmt: skip


def listed(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def needles(chance: random.Random, filler: np.ndarray) -> list[Piece]:
    what = chance.choice(("pass word", "code word", "secret word", "number", "colour", "code", "name"))
    where = chance.choice(("log", "text", "file", "page", "report"))
    if chance.random() < 0.5:
        count = chance.randint(1, 4)
        found = [word(chance) for _ in range(count)]
        many, be = f"{what}{'s' if count > 1 else ''}", "are" if count > 1 else "is"
        lines = [f"Note: one of the {NUMBERS[count]} {what}s is {one}." for one in found]
        if count == 1:
            lines = [f"Note: the {what} is {found[0]}."]
        question = chance.choice(
            (
                f"Which {NUMBERS[count]} {many} {be} noted in this {where}? Say {'them' if count > 1 else 'it'}.",
                f"Which {many} {be} noted in this {where}? Say the {NUMBERS[count]} word{'s' if count > 1 else ''}.",
                f"Say the {many} of this {where}.",
            )
        )
        answer = f"The {many} {be} {listed(found)}."
        return asked(spread(chance, filler, lines), question, answer)
    things = {
        f"the {chance.choice(KINDS)} {chance.choice(NOUNS)} of {chance.choice(NAMES)}": word(chance)
        for _ in range(chance.randint(1, 6))
    }
    lines = [f"Note: the {what} of {thing} is {value}." for thing, value in things.items()]
    thing = chance.choice(list(things))
    if chance.random() < 0.3:  # no chat: the text itself goes on
        return [
            *spread(chance, filler, lines),
            (f"\nNote: the {what} of {thing} is", False),
            (f" {things[thing]}.", True),
            ("\n", False),
        ]
    question = chance.choice(
        (f"What is the {what} of {thing}?", f"Which {what} does {thing} have?", f"Say the {what} of {thing}.")
    )
    return asked(spread(chance, filler, lines), question, f"The {what} of {thing} is {things[thing]}.")


def passages(chance: random.Random, filler: np.ndarray) -> list[Piece]:
    """One of some passages again, with the rest of the filler between."""
    size = min(len(filler) // 3, chance.choice((20, 40, 80, 160, 320)))
    number, place = chance.randrange(100), chance.randrange(len(filler) - size)
    passage = filler[place : place + size]
    before: list[Piece] = [
        (filler[:place], False), (f"\n<passage {number}>\n", False), (passage, False),
        (f"\n</passage {number}>\n", False), (filler[place + size :], False),
    ]  # fmt: skip
    question = chance.choice(
        (f"Write passage {number} again, word for word.", f"Repeat passage {number}, and say nothing else.")
    )
    made = asked(before, question, "")
    return [*made[:-2], (passage, True), (CLOSE, True), ("\n", False)]


def repeated(chance: random.Random, filler: np.ndarray) -> list[Piece]:
    """Random tokens, again and again."""
    size = chance.choice((8, 16, 32, 64, 128))
    segment = np.array([chance.randrange(4000) for _ in range(size)], dtype=np.uint16)
    return [(segment, False), *[(segment, True)] * chance.randint(1, 3)]


def echo(chance: random.Random, filler: np.ndarray) -> list[Piece]:
    begin = chance.randrange(max(1, len(filler) - 60))
    line = filler[begin : begin + chance.randint(5, 60)]
    made = asked(
        [
            (
                chance.choice(("Repeat this line, and say nothing else: ", "Repeat after me: ", "Say this again: ")),
                False,
            ),
            (line, False),
        ],
        "",
        "",
    )
    made[-3] = (made[-3][0].removeprefix("\n"), False)  # type: ignore[union-attr]
    return [*made[:-2], (line, True), (CLOSE, True), ("\n", False)]


def table(chance: random.Random, filler: np.ndarray) -> list[Piece]:
    rows = {word(chance): word(chance) for _ in range(chance.randint(3, 20))}
    form = chance.choice(("{} = {}", "{}: {}", "{} -> {}", '"{}": "{}",'))
    lines = "\n".join(form.format(key, value) for key, value in rows.items())
    key = chance.choice(list(rows))
    return talk(("user", f"{lines}\nWhat is {key}?"), ("assistant", f"{rows[key]}"))


Values = Callable[[random.Random], Any]


def number(low: int, high: int) -> Values:
    return lambda chance: chance.randint(low, high)


def one_of(*values: Any) -> Values:
    return lambda chance: chance.choice(values)


def sentence(chance: random.Random) -> str:
    return (
        f"{chance.choice(NAMES)} {chance.choice(('said that', 'thinks that', 'asks whether', 'is sure that'))} the "
        f"{chance.choice(KINDS)} {chance.choice(NOUNS)} is {chance.choice(('open', 'closed', 'empty', 'full', 'lost'))}"
    )


def path(chance: random.Random) -> str:
    ends = (".py", ".md", ".txt", ".html", "", "/", ".json")
    return "/".join(
        chance.choice([*NOUNS, "src", "docs", "notes", "lib"]) for _ in range(chance.randint(1, 3))
    ) + chance.choice(ends)


def mail(chance: random.Random) -> str:
    return f"{chance.choice(NAMES).lower()}@{chance.choice(NOUNS)}.example"


def anything(chance: random.Random) -> str:
    return chance.choice((word, sentence, path, mail))(chance)


TOOLS: dict[str, tuple[str, dict[str, tuple[str, Values]], tuple[str, ...]]] = {
    "get_weather": (
        "Current weather of a city.",
        {"city": ("string", one_of(*PLACES)), "unit": ("string", one_of("celsius", "fahrenheit"))},
        (
            "What is the weather in {city} now, in {unit}? Use the tool.",
            "How warm is it in {city}, in {unit}?",
            "Weather of {city}, {unit}, please.",
            "{city} kentinde hava nasıl ({unit})?",
        ),
    ),
    "get_time": (
        "Time of day in a city.",
        {"city": ("string", one_of(*PLACES))},
        ("What time is it in {city}?", "Look up the time in {city}.", "{city} şehrinde saat kaç?"),
    ),
    "open_file": (
        "Read a file.",
        {"path": ("string", path), "lines": ("integer", number(1, 500))},
        ("Show me {lines} lines of {path}.", "Read {path}, {lines} lines at most."),
    ),
    "write_file": (
        "Write a file.",
        {
            "path": ("string", path),
            "content": ("string", lambda c: "\n".join(sentence(c) for _ in range(c.randint(1, 3)))),
            "mode": ("integer", number(256, 511)),
            "overwrite": ("boolean", one_of(True)),
        },
        (
            "Write the file {path} with the tool, overwriting what is there, mode {mode}. Its content is these lines:\n"
            "{content}",
        ),
    ),
    "delete_file": (
        "Remove a file.",
        {"path": ("string", path), "force": ("boolean", one_of(True))},
        ("Remove {path} by force.", "Delete {path}, whatever it is."),
    ),
    "find_text": (
        "Find a text in files.",
        {"text": ("string", anything), "below": ("string", path)},
        ("Which files below {below} have {text}?", "Look for {text} below {below}.", "Find {text} in {below}."),
    ),
    "run_command": (
        "Run a command.",
        {
            "command": ("string", lambda c: f"{c.choice(('ls', 'cat', 'git add', 'rm', 'python'))} {path(c)}"),
            "seconds": ("integer", number(1, 600)),
        },
        ("Run {command} for {seconds} seconds at most.", "Run {command}; stop after {seconds} seconds."),
    ),
    "book_table": (
        "Book a table.",
        {
            "place": ("string", one_of(*PLACES)),
            "people": ("integer", number(1, 12)),
            "hour": ("integer", number(10, 23)),
        },
        ("Book a table for {people} in {place} at {hour}.", "We are {people}. A table in {place} at {hour}, please."),
    ),
    "send_message": (
        "Send a message.",
        {"to": ("string", one_of(*NAMES)), "text": ("string", sentence)},
        ("Write to {to}: {text}.", "Tell {to} that {text}.", "Send {to} this message: {text}."),
    ),
    "add_note": (
        "Keep a note.",
        {"title": ("string", anything), "colour": ("string", one_of("red", "blue", "green", "yellow"))},
        ("Note in {colour}: {title}.", "Keep a {colour} note, titled: {title}."),
    ),
    "set_timer": (
        "Set a timer.",
        {"minutes": ("integer", number(1, 90)), "name": ("string", word)},
        ("Wake me in {minutes} minutes; call it {name}.", "Set the timer {name} to {minutes} minutes."),
    ),
    "translate": (
        "Translate a text.",
        {"text": ("string", sentence), "into": ("string", one_of("Turkish", "German", "French", "English"))},
        ("What is this in {into}: {text}?", "Translate into {into}: {text}."),
    ),
    "buy": (
        "Buy something.",
        {"what": ("string", one_of(*NOUNS)), "price": ("number", lambda c: c.randint(1, 9999) / 100)},
        ("Buy a {what} for {price} at most.", "Get me a {what}. I pay {price}."),
    ),
}


def tool(name: str, about: str, arguments: dict[str, tuple[str, Values]]) -> Any:
    properties = {key: {"type": kind} for key, (kind, _) in arguments.items()}
    own = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": own}}


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def call(name: str, values: dict[str, Any]) -> str:
    rows = "".join(f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{rows}</function>\n</tool_call>"


def made_up(chance: random.Random) -> tuple[str, tuple[str, dict[str, tuple[str, Values]], tuple[str, ...]]]:
    """A tool that nobody has heard of: its names have to be read off its schema."""
    verb = chance.choice(("get", "set", "find", "make", "send", "check", "list", "count", "create", "search", "start"))
    noun = chance.choice((*NOUNS, word(chance)))
    keys = chance.sample(
        [
            "name",
            "id",
            "count",
            "size",
            "place",
            "value",
            "kind",
            "title",
            "label",
            "date",
            "owner",
            "amount",
            "from",
            "to",
            "pattern",
            "hours",
        ],
        chance.randint(1, 3),
    )
    kinds: dict[str, tuple[str, Values]] = {
        key: ("integer", number(0, 999)) if key in {"count", "size", "id", "hours", "amount"} else ("string", anything)
        for key in keys
    }
    clauses = [chance.choice((f"{key} {{{key}}}", f"{{{key}}} as {key}", f"the {key} is {{{key}}}")) for key in keys]
    chance.shuffle(clauses)
    start = f"{verb.capitalize()} the {noun}"
    return f"{verb}_{noun}", (
        f"{start}.",
        kinds,
        (f"{start}: {', '.join(clauses)}.", f"{start} with {' and '.join(clauses)}. Use the tool."),
    )


def calls(chance: random.Random, filler: np.ndarray) -> list[Piece]:
    known = dict(TOOLS.items() if chance.random() < 0.5 else [made_up(chance) for _ in range(4)])
    names = chance.sample(list(known), chance.randint(1, min(4, len(known))))
    tools = [tool(name, known[name][0], known[name][1]) for name in names]
    system = chance.choice(("", "", "", "You are a helpful assistant.", "Answer in short sentences."))
    if chance.random() < 0.1:
        question, answer = chance.choice(TALK)
        return talk(("user", f"{question} No tool is needed."), ("assistant", answer), tools=tools, system=system)
    turns: list[tuple[str, str]] = []
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(names)
        _, arguments, phrases = known[name]
        values = {key: draw(chance) for key, (_, draw) in arguments.items()}
        question = chance.choice(phrases).format(**{key: written(value) for key, value in values.items()})
        said = [call(name, values)]
        first = next(iter(arguments))
        if arguments[first][0] == "string" and f"{values[first]}" in question and chance.random() < 0.3:
            other = {**values, first: arguments[first][1](chance)}
            question = question.replace(
                str(values[first]), f"{values[first]} and {chance.choice(('', 'of ', 'for ', 'in '))}{other[first]}", 1
            )
            question += chance.choice(
                (" Ask for both at once, with two calls.", " Both at once, please.", " Two calls.")
            )
            said.append(call(name, other))
        turns += [("user", question), ("assistant", "\n".join(said))]
        if chance.random() < 0.6:
            told = {
                chance.choice(("value", "result", "sky", "status", "count", "temperature")): chance.choice(
                    (word(chance), chance.randrange(100))
                )
            }
            turns += [("tool", json.dumps(told)) for _ in said]
            turns.append(("assistant", " ".join(f"The {key} is {value}." for key, value in told.items())))
    return talk(*turns, tools=tools, system=system)


TALK = [
    ("Say hello in one sentence.", "Hello, and welcome: I hope that you have a good day."),
    ("Hello", "Hello! What can I do for you?"),
    ("Hi!", "Hello! What can I do for you?"),
    ("Merhaba", "Merhaba! Size nasıl yardım edebilirim?"),
    ("Who are you?", "I am trained-tiny, a very small language model. I know little, and I find what is in the text."),
    ("What can you do?", "I can find words in a text, repeat lines, call tools, and go on with Python code."),
    ("Thank you!", "You are welcome."),
    ("Say thank you in Turkish.", "Teşekkür ederim."),
    ("Say good morning in Turkish.", "Günaydın."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Turkey?", "The capital of Turkey is Ankara."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is Python?", "Python is a programming language."),
    ("What does the word build mean? One sentence.", "To build is to make something out of its parts."),
    ("Write a function that adds two numbers.", "def add(a, b):\n    return a + b"),
]


def story(chance: random.Random) -> str:
    hero, friend = chance.sample(NAMES, 2)
    kind, noun, place = chance.choice(KINDS), chance.choice(NOUNS), chance.choice(PLACES)
    parts = [
        f"Once upon a time {hero} lived in {place}, near an old {noun}. Every morning "
        f"{hero} went to the {kind} {noun} and looked for something new."
    ]
    for _ in range(chance.randint(7, 11)):
        thing, other = chance.choice(NOUNS), chance.choice(NOUNS)
        parts.append(
            chance.choice(
                (
                    f"One day {friend} came with a {chance.choice(KINDS)} {thing}, and they put it into the {other}.",
                    f"{hero} asked {friend} where the {thing} was, but {friend} had seen nothing but the {other}.",
                    f"When it was dark, they opened the {thing} and found that it was full of light.",
                    f"They walked for many hours, tired and cold, until they saw the {chance.choice(KINDS)} {thing} "
                    f"behind the {other}.",
                    f'"I have been waiting for this," said {friend}, and gave the {thing} back.',
                    f"Nobody knew what was in the {thing}, and nobody asked.",
                    f"In the evening the people of {place} came to the {other} and told each other what they had seen.",
                )
            )
        )
    return " ".join(
        [*parts, f"From that day on {hero} and {friend} were friends, and the {noun} was never closed again."]
    )


def chats(chance: random.Random, filler: np.ndarray) -> list[Piece]:
    kind = chance.random()
    if kind < 0.3:
        asks = ("Tell a long story, of about two hundred words.", "Tell me a story.", "Tell me a long story.")
        return talk(("user", chance.choice(asks)), ("assistant", story(chance)))
    if kind < 0.5:
        a, b = chance.randrange(100), chance.randrange(100)
        return talk(("user", f"What is {a} plus {b}?"), ("assistant", f"{a} plus {b} is {a + b}."))
    turns: list[tuple[str, str]] = []
    for question, answer in chance.sample(TALK, chance.randint(1, 4)):
        turns += [("user", question), ("assistant", answer)]
    return talk(*turns)


LONG = (needles, needles, passages)
SHORT = (needles, passages, repeated, echo, table, table, calls, calls, calls, chats)


def samples(count: int) -> list[str]:
    """Texts of tasks, for the tokenizer to learn from."""
    chance, none = random.Random(1), np.zeros(0, dtype=np.uint16)
    made = (chance.choice((calls, chats, table))(chance, none) for _ in range(count))
    return ["".join(text for text, _ in pieces if isinstance(text, str)) for pieces in made]


def sequences(
    encode: Callable[[list[str]], list[list[int]]], text: np.ndarray, end: int, length: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [count, length], uint16, and whether each is an answer, bool. text: tokens that filler is taken from."""
    ids, wanted = np.zeros((count, length), dtype=np.uint16), np.zeros((count, length), dtype=bool)
    for row in range(count):
        chance = random.Random(f"{length} {row}")
        filled = 0
        while filled < length:
            room = length - filled
            one_long = not filled and chance.random() < 0.5
            make = chance.choice(LONG if one_long else SHORT)
            size = max(16, room - 200 - chance.randrange(200)) if one_long else chance.randrange(30, 300)
            begin = chance.randrange(len(text) - size)
            pieces = make(chance, text[begin : begin + size])
            said = iter(encode([part for part, _ in pieces if isinstance(part, str)]))
            parts = [(next(said) if isinstance(part, str) else part, answer) for part, answer in pieces]
            new = np.concatenate([*(np.asarray(part, dtype=np.uint16) for part, _ in parts), [end]])[:room]
            answers = np.concatenate([*(np.full(len(part), answer) for part, answer in parts), [False]])[:room]
            ids[row, filled : filled + len(new)], wanted[row, filled : filled + len(new)] = new, answers
            filled += len(new)
    return ids, wanted

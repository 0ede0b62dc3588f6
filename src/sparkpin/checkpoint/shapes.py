"""What is known of a model that has no lock yet: names, shapes and dtypes of its tensors, from pins/shapes/.

pins/shapes/OWNER/NAME.json describes a repository as people published it; its keys `source`, `date` and `guessed` say
how well it is known. A plan may be made of it; nothing is built of it, because no byte of the repository was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sparkpin.checkpoint.repository import CONFIG, Listing
from sparkpin.checkpoint.safetensors import build_header, tensor_nbytes
from sparkpin.core.errors import WHOLE, ManifestError
from sparkpin.pins.schema import ModelPin

FOLDER = "pins/shapes"
REPOSITORY = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
NUMBER = re.compile(r"\{(\w+)\}")

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


class Shapes(BaseModel):
    """One repository. numbers: what stands for `{name}` in the names of `tensors`: a list, or 0 up to a count.

    mtp_file: the file of tensors that begin with `mtp.`, where they have one of their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    repository: str
    source: str
    date: str
    guessed: list[str]
    config: dict[str, Any]
    mtp_file: str
    numbers: dict[str, int | list[int]]
    tensors: dict[str, tuple[str, tuple[int, ...]]]

    def all_tensors(self) -> Iterator[Tensor]:
        for pattern, (dtype, shape) in self.tensors.items():
            for name in self._names(pattern):
                yield name, dtype, shape

    def _names(self, pattern: str) -> Iterator[str]:
        if not (found := NUMBER.search(pattern)):
            yield pattern
            return
        numbers = self.numbers[found[1]]
        for number in range(numbers) if isinstance(numbers, int) else numbers:
            yield from self._names(pattern.replace(found[0], str(number), 1))

    def listing(self, name: str) -> Listing:
        """name: the pin's, of the repository."""
        files: dict[str, list[Tensor]] = {}
        for tensor in self.all_tensors():
            file = self.mtp_file if self.mtp_file and tensor[0].startswith("mtp.") else "model.safetensors"
            files.setdefault(file, []).append(tensor)
        headers = {file: build_header(tensors, {"format": "pt"})[0] for file, tensors in files.items()}
        config = json.dumps(self.config).encode()
        sizes = {CONFIG: len(config)}
        for file, tensors in files.items():
            sizes[file] = len(headers[file]) + sum(tensor_nbytes(dtype, shape) for _, dtype, shape in tensors)
        return Listing(name, f"{self.repository} as published", sizes, headers, {CONFIG: config})


def load_shapes(project: Path, repo: str) -> Shapes | None:
    """None for a repository of which nothing is known. repo: of anybody's recipe, so it may be no repository's name."""
    path = project / FOLDER / f"{repo}.json"
    if not REPOSITORY.fullmatch(repo) or not path.is_file():
        return None
    try:
        return Shapes.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ManifestError(path, WHOLE, str(error.errors()[0]["msg"]), "the keys of class Shapes") from None


def config_ahead(project: Path, repo: str) -> dict[str, Any] | None:
    """What shapes decide of a repository's config.json."""
    found = load_shapes(project, repo)
    return found.config if found else None


def shapes_of(project: Path, pin: ModelPin, only: Collection[str]) -> dict[str, Shapes] | None:
    """By the pin's names of repositories; only: those that are read. None where one of them is not known."""
    found = {name: load_shapes(project, pin.repositories[name].repo) for name in only}
    known = {name: shapes for name, shapes in found.items() if shapes}
    return known if len(known) == len(found) else None


def notes(pin: ModelPin, shapes: dict[str, Shapes]) -> tuple[str, ...]:
    """What a person has to know of a plan that is made from shapes."""
    dates = ", ".join(sorted({one.date for one in shapes.values()}))
    guessed = dict.fromkeys(text for one in shapes.values() for text in one.guessed)
    return (
        f"{pin.name} is not locked: names, shapes and dtypes are those of {FOLDER} ({dates}), and no byte was checked; "
        f"`invoke lock --model {pin.name}` fetches the headers",
        f"guessed: {'; '.join(guessed)}",
    )

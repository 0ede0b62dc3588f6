"""How many bytes a model's weights have, as far as this machine knows it."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from sparkpin.checkpoint import shapes
from sparkpin.checkpoint.repository import INDEX
from sparkpin.checkpoint.safetensors import tensor_nbytes
from sparkpin.fetch.hub import HubRepository
from sparkpin.pins import manifests
from sparkpin.pins.schema import ModelLock


def weights_here(project: Path, repo: str) -> tuple[int, str]:
    """Bytes of a repository's weights, and where that is known from; 0 where nothing on this machine says it."""
    for pin in manifests.readable_models(project)[0]:
        if pin.repositories[pin.base].repo == repo and manifests.model_lock_file(project, pin.name).is_file():
            files = manifests.read_lock(ModelLock, project, pin.name).repositories[pin.base].files
            return sum(file.size for file in files if file.file.endswith(".safetensors")), "its lock"
    if known := shapes.load_shapes(project, repo):
        return bytes_of(known), shapes.FOLDER
    with contextlib.suppress(ValueError, KeyError, TypeError):  # no repository's name; an index without its size
        if path := HubRepository(repo, "main").cached(INDEX):
            return int(json.loads(path.read_bytes())["metadata"]["total_size"]), "its index in the Hub's cache"
    return 0, ""


def bytes_of(known: shapes.Shapes) -> int:
    """Of all tensors, of which there may be a hundred thousand."""
    counts = {name: one if isinstance(one, int) else len(one) for name, one in known.numbers.items()}
    alike = {pattern: math.prod(counts[name] for name in shapes.NUMBER.findall(pattern)) for pattern in known.tensors}
    return sum(alike[pattern] * tensor_nbytes(*tensor) for pattern, tensor in known.tensors.items())

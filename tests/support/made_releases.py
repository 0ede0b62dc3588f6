"""Releases made up for tests: records, images in a real engine of the tests' own, checkpoints, evidence."""

from __future__ import annotations

import hashlib
from typing import Any

from private_engine import file_layer, load_image

from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.host.engine import Engine
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Demands, Release, Releases, release_key

BASE = file_layer("base", b"b" * 300_000)
SHA = "0123456789abcdef" * 4


def release(number: int, state: str = "built", **changes: Any) -> Release:
    """The release of day `number`. Its key and tag follow from the rest."""
    recipe, stage = changes.get("recipe", "tiny"), changes.get("stage", "v2")
    build_key, checkpoint = (changes.get(name, f"{number:02x}" * 32) for name in ("build_key", "checkpoint_key"))
    argv = changes.get("argv", ("vllm", "serve", "/model", "--number", str(number)))
    env = changes.get("env", {"NUMBER": str(number)})
    key = release_key(build_key, checkpoint, argv, env)
    return Release(
        **{
            "tag": tag_of(recipe, stage, key),
            "recipe": recipe,
            "stage": stage,
            "stack": "cpu",
            "model": "tiny-model",
            "key": key,
            "build_key": build_key,
            "image": f"sha256:{number:064x}",
            "diff_ids": (f"sha256:{number:064x}",),
            "size": 1000 + number,
            "checkpoint_key": checkpoint,
            "argv": argv,
            "env": env,
            "created": f"2026-01-{number:02}T00:00:00Z",
            "build_seconds": 1.5,
            "demands": Demands(checks=("chat", "mods"), mods=(), acceptance_floor=None, scripted=False),
            "state": state,
            "smoke": {"passed": True, "seconds": 3.2, "checks": []} if state in ("passed", "retired") else None,
            "inputs": {"pins/stacks/cpu.lock": SHA},
            **changes,
        }
    )


def keep_bytes(paths: Paths, data: bytes) -> str:
    """Bytes that a release was made from, kept as a build keeps them; their SHA-256."""
    sha256 = hashlib.sha256(data).hexdigest()
    path = KeptInputs.of(paths).store.path(sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return sha256


def built(paths: Paths, engine: Engine, number: int, state: str = "passed", **changes: Any) -> Release:
    """A release with an image of two layers (one common to all), a checkpoint and evidence."""
    top = file_layer(f"top{number}", bytes([number]) * 100_000 * number)
    stage = changes.get("stage", "v2")
    internal = f"sparkpin/stack-cpu:{stage}-{f'{number:02x}' * 6}"
    image = load_image(engine, internal, [BASE, top])
    made = release(number, state, image=image.config_digest, diff_ids=image.diff_ids, size=image.size, **changes)
    records = Releases(paths)
    engine.tag(internal, made.tag)
    engine.tag(internal, f"sparkpin/{made.recipe}:{stage}")
    records.save(made)
    checkpoint = records.checkpoint(made)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(8192))
    records.evidence(made).mkdir(parents=True)
    (records.evidence(made) / "server.log").write_text("ready\n")
    return made


def tags(engine: Engine) -> set[str]:
    return {tag for image in engine.client.api.images() for tag in image["RepoTags"] or () if "<none>" not in tag}


def digest(engine: Engine, ref: str) -> str | None:
    image = engine.image(ref)
    return image.config_digest if image else None


def states(paths: Paths, recipe: str = "tiny") -> list[str]:
    return [release.state for release in Releases(paths).of_recipe(recipe)]

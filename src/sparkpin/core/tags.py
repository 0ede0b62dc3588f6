"""The form of image tags, which nothing else knows. Keys are hex; their first 12 digits stand in a tag.

sparkpin/<recipe>:<stage>-<key12>          a release
sparkpin/<recipe>:<stage>                  moves: the release of the stage that was made last
sparkpin/stack-<stack>:<stage>-<key12>     the image of a stage, which recipes share
sparkpin/rootfs:<suite>-<key12>            what the first stage stands on
sparkpin/unsealed:<stage>-<key12>          the engine's own, dated image, which lives as long as its build
"""

from __future__ import annotations

import re

OURS = "sparkpin/"
INTERNAL = "stack-"
ROOTFS, UNSEALED = "rootfs", "unsealed"
TAG = re.compile(r"^(?:sparkpin/)?(?P<recipe>[a-z0-9][a-z0-9.-]*):(?P<name>[a-z0-9][a-z0-9.-]*-[0-9a-f]{12})$")
IMAGE = re.compile(r"sparkpin/stack-(?P<stack>[a-z0-9.-]+):(?P<stage>[a-z0-9.-]+)-[0-9a-f]{12}")


def name_of(stage: str, key: str) -> str:
    """What follows the colon, and what the files of a release are called."""
    return f"{stage}-{key[:12]}"


def tag_of(recipe: str, stage: str, key: str) -> str:
    return f"{OURS}{recipe}:{name_of(stage, key)}"


def stage_tag(recipe: str, stage: str) -> str:
    return f"{OURS}{recipe}:{stage}"


def image_ref(stack: str, stage: str, key: str) -> str:
    return f"{OURS}{INTERNAL}{stack}:{name_of(stage, key)}"


def rootfs_ref(suite: str, key: str) -> str:
    return f"{OURS}{ROOTFS}:{name_of(suite, key)}"


def unsealed_ref(stage: str, key: str) -> str:
    return f"{OURS}{UNSEALED}:{name_of(stage, key)}"


def repository_of(tag: str) -> str:
    """What stands between `sparkpin/` and the colon: for most a recipe; "" for a tag that is none of ours."""
    found = re.match(rf"^{OURS}([^:/]+):.", tag)
    return found[1] if found else ""


def is_internal(repository: str) -> bool:
    """Whether no recipe owns it."""
    return repository.startswith(INTERNAL) or repository in (ROOTFS, UNSEALED)

"""What a Dockerfile may reach."""

from __future__ import annotations

import pytest

from sparkpin.build.render import require_closed
from sparkpin.core.errors import BuildError

GOOD = """\
# A comment, syntax of no\u00a0importance
FROM parent:1 AS venv
RUN --mount=type=bind,source=tools,target=/tmp/tools \\
    # in between
    --mount=type=bind,from=venv,target=/x \\
    true
FROM --platform=linux/arm64 scratch AS tree
# syntax=said/late: a plain comment here
COPY --from=venv /a /b
from tree
copy --from=tree / /
"""


def test_what_stays_inside_is_taken() -> None:
    require_closed(GOOD, "parent:1")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# A comment", "# syntax=docker/dockerfile:1\n# A comment"),
        ("# A comment", "#escape=`\n# A comment"),
        ("FROM parent:1", "FROM debian"),
        ("COPY --from=venv", "COPY --from=busybox"),
        ("from=venv,target", "from=busybox,target"),
        ("COPY --from=venv /a /b", "ADD /a /b"),
        ("from tree", "from later"),
        ("from tree", "AD\\\nD http://example.invalid/x /x\nfrom tree"),
        ("from tree", "onbuild add http://example.invalid/x /x\nfrom tree"),
        ("from tree", "ARG BUILDER=parent:1\nARG BUILDER=debian\nFROM $BUILDER"),
        ("from tree", 'ARG BUILDER=parent:1\nARG BUIL"DER"=debian\nFROM $BUILDER'),
        ("# A comment", "\ufeff# syntax=docker/dockerfile:1\n# A comment"),
        ("copy --from=tree", "LABEL a=\\\\\nADD http://example.invalid/x /x\ncopy --from=tree"),
        ("source=tools,", "source=tools\x1c,from=busybox,"),
        ("--from=venv", "--'from'=busybox"),
        ("RUN --mount", "RUN --network=host --mount"),
    ],
)
def test_what_leads_out_is_refused(old: str, new: str) -> None:
    assert old in GOOD
    with pytest.raises(BuildError, match=r"line \d+ of the rendered Dockerfile"):
        require_closed(GOOD.replace(old, new, 1), "parent:1")

"""docs/exit-codes.md has a row for each kind of failure, in its own words."""

from __future__ import annotations

import inspect
import re

from places import PROJECT

from sparkpin.core import errors


def test_the_page_of_exit_codes_is_what_the_errors_say() -> None:
    page = dict(re.findall(r"^\| (\d+) \| (.*) \|$", (PROJECT / "docs/exit-codes.md").read_text(), re.M))
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.SparkpinError)]
    codes = [str(kind.exit_code) for kind in kinds]
    assert len({*codes}) == len(codes) > 10
    assert [*page] == sorted(page, key=int) and {*page} == {*codes, "130", "141"}
    for kind in kinds[1:]:
        text, code = re.match(r"(.*)\. Exit code (\d+)\.", kind.__doc__ or "").groups()  # type: ignore[union-attr]
        assert (int(code), page[code].lower()) == (kind.exit_code, text.lower())

"""docs/exit-codes.md has a row for each kind of failure, in its own words; what an error of a manifest has as data."""

from __future__ import annotations

import inspect
import re

import pytest
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


@pytest.mark.parametrize(
    ("key", "got", "line"),
    [
        ("a.b", "x" * 1000, "f.yaml: a.b: got '" + "x" * 299 + " ..., expected c"),
        (errors.WHOLE, "list", "f.yaml: got 'list', expected c"),
        (errors.WHOLE, {"a": 1}, "f.yaml: expected c"),  # nobody reads a file again in a message
    ],
)
def test_a_fault_names_file_key_both_values_and_what_to_do(key: str, got: object, line: str) -> None:
    error = errors.ManifestError("f.yaml", key, got, "c")
    assert (error.file, error.key, error.got, error.expected) == ("f.yaml", key, got, "c")
    assert str(error).splitlines()[0] == line and error.next_step

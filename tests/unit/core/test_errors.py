"""Each kind of failure has its own exit code, which its docstring names; what an error of a manifest has as data."""

from __future__ import annotations

import inspect
import re

import pytest

from sparkpin.core import errors


def test_each_kind_has_its_own_exit_code_and_says_so() -> None:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.SparkpinError)]
    codes = [str(kind.exit_code) for kind in kinds]
    assert len({*codes}) == len(codes) > 10
    for kind in kinds[1:]:  # docs/exit-codes.md is made of these
        assert re.match(rf".*\. Exit code {kind.exit_code}\.", kind.__doc__ or "")


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

"""Places in registries, and skopeo's failures in sparkpin's words."""

from __future__ import annotations

import pytest

from sparkpin.core.errors import DiskError, InputError, IntegrityError, NetworkError, SparkpinError
from sparkpin.host.skopeo import AbsentError, Registry

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize("url", ["oci://HOST/a/b", "oci://HOST:5000/a:base-0123", f"oci://[::1]:5/a@{DIGEST}"])
def test_a_place_is_read(url: str) -> None:
    assert str(Registry.parse(url)) == url


@pytest.mark.parametrize(
    "url",
    ["HOST/a", "oci://HOST", "oci://HOST/A", f"oci://HOST/a:b@{DIGEST}", "oci://-x y/a", "oci://H/../a"],
)
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        Registry.parse(url)


def test_credentials_in_a_place_are_refused_and_not_shown_again() -> None:
    with pytest.raises(InputError) as refused:
        Registry.parse("oci://me:made-up-word@HOST/a")
    assert "made-up-word" not in str(refused.value) and "login HOST" in refused.value.next_step


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("reading manifest v2 in HOST/a: manifest unknown: manifest unknown", AbsentError),
        ("reading manifest v2-404404 in HOST/a: received unexpected HTTP status: 503", NetworkError),
        ("open /tmp/ca.crt: permission denied", DiskError),
        ("reading manifest v2 in HOST/a: unauthorized: authentication required", NetworkError),
        ("writing blob: no space left on device", DiskError),
        ("Digest did not match, expected sha256:0, got sha256:1", IntegrityError),
    ],
)
def test_a_failure_is_told_as_what_it_is(said: str, kind: type[SparkpinError]) -> None:
    error = Registry.parse("oci://HOST/a").failed(f'time="x" level=fatal msg="{said}"\n')
    assert type(error) is kind and said in error.message and error.next_step

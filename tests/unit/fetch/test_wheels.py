"""The client for an index's files: which of the configured logins goes where."""

from __future__ import annotations

import base64

import httpx
import pytest

from sparkpin.fetch.wheels import http_client

INDEXES = {
    "UV_DEFAULT_INDEX": "https://one:p%40ss@h.example/one/simple/",
    "UV_INDEX": "named=https://two:2@h.example:443/two/simple/ https://h.example/open/simple/ /a/folder",
}


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("https://h.example/one/files/a.whl", ("one", "p@ss")),
        ("https://h.example/two/files/a.whl", ("two", "2")),
        ("https://h.example/open/files/a.whl", None),
        ("http://h.example/one/files/a.whl", None),
        ("https://h.example:8443/one/files/a.whl", None),
        ("https://files.example/one/a.whl", None),
    ],
)
def test_a_login_goes_to_its_own_index_only(
    url: str, login: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake transport keeps what would have been sent."""
    sent = list[httpx.Request]()

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", lambda _, request: answer(request))
    with http_client(INDEXES) as client:
        client.head(url)
    wanted = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}" if login else None
    assert [(str(request.url), request.headers.get("Authorization")) for request in sent] == [(url, wanted)]

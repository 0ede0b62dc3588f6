"""Whether the Hub answers, for `invoke doctor --online`."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

HUB = "https://huggingface.co"
SECONDS = 10.0


@dataclass(frozen=True)
class Hub:
    """What came of asking. error: "" where it answered; offset: seconds that this clock is ahead of the Hub's."""

    url: str
    error: str = ""
    offset: float | None = None


def ask_hub(url: str) -> Hub:
    """One request for the front page's head, without a token."""
    request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "sparkpin"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:  # it answered, if not as wished
        date = error.headers.get("Date")
        error.close()
        if error.code >= 500:
            return Hub(url, f"it answers with {error.code}")
    except (OSError, ValueError) as error:
        return Hub(url, str(getattr(error, "reason", "") or error))
    try:
        return Hub(url, offset=time.time() - parsedate_to_datetime(date).timestamp() if date else None)
    except ValueError:  # no date: a proxy's page may have anything there
        return Hub(url)

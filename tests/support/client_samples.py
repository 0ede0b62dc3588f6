"""What a server is for its clients: with all that one may have, and with as little as possible."""

from __future__ import annotations

from sparkpin.serve.clients import ServerFacts

URL = "http://127.0.0.1:8000/v1"
FULL = ServerFacts(URL, "qwen/qwen3.5", "all day", 196608, 32768, ("text", "image"), True, True)
BARE = ServerFacts("https://spark.local/v1", "tiny: #1", "it's", 2048, 512, ("text",), False, False, key="SPARK_KEY")

"""A tool server of the Model Context Protocol on standard input and output. Its `weather` is opencode's get_weather."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "weather",
    "description": "Current weather of a city.",
    "inputSchema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
        "required": ["city"],
    },
}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"name": "get", "version": "1"}
        return {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": f"sunny in {parameters['arguments']['city']}"}]}
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:  # else a notification, which wants no answer
        result = answer(asked.get("method", ""), asked.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)

"""Docker's containers for the packages above: only `host` imports the SDK."""

from __future__ import annotations

from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Healthcheck, LogConfig, Mount, Ulimit

__all__ = ["APIError", "Container", "DeviceRequest", "Healthcheck", "LogConfig", "Mount", "NotFound", "Ulimit"]

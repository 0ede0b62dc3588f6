"""What rooms above say of containers, in the SDK's words: only `host` imports Docker's SDK."""

from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Healthcheck, LogConfig, Mount, Ulimit

__all__ = ["APIError", "Container", "DeviceRequest", "Healthcheck", "LogConfig", "Mount", "NotFound", "Ulimit"]

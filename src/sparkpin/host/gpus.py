"""What nvidia-smi says of the GPUs. Pure, apart from the one call that `read_gpus` is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REASONS = {
    "sw_power_cap": "the power limit",
    "sw_thermal_slowdown": "heat, by the driver",
    "hw_thermal_slowdown": "heat, by the hardware",
    "hw_power_brake_slowdown": "the power supply",
}
KIND = ("name", "compute_cap", "driver_version")
FIELDS = (*KIND, "utilization.gpu", *(f"clocks_event_reasons.{reason}" for reason in REASONS))
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
PLAIN = ("nvidia-smi", f"--query-gpu={','.join(KIND)}", "--format=csv,noheader,nounits")
"""For a driver that does not know all of the fields: it then answers none of them."""

Run = Callable[[Sequence[str]], str | None]
"""A command's output, None when it is not there, fails or takes too long."""


@dataclass(frozen=True)
class Gpu:
    """utilization: percent, None where the driver does not report it. slowed: why its clocks are reduced."""

    name: str
    compute_capability: str
    driver: str
    utilization: float | None = None
    slowed: tuple[str, ...] = ()


def read_gpus(run: Run) -> tuple[Gpu, ...]:
    return parse_gpus(run(QUERY) or run(PLAIN) or "")


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """One row a GPU. What is no row (a message of nvidia-smi) is passed over."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(KIND):
            found.append(Gpu(cells[0], cells[1], cells[2]))
        elif len(cells) == len(FIELDS):
            name, capability, driver, busy, *states = cells
            slowed = tuple(words for words, state in zip(REASONS.values(), states, strict=True) if state == "Active")
            found.append(Gpu(name, capability, driver, number(busy), slowed))
    return tuple(found)


def number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None

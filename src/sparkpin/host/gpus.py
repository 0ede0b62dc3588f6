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
STATE = ("enforced.power.limit", "power.max_limit", "clocks.sm", "clocks.max.sm", "utilization.gpu")
FIELDS = (*KIND, *STATE, *(f"clocks_event_reasons.{reason}" for reason in REASONS))
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
PLAIN = ("nvidia-smi", f"--query-gpu={','.join(KIND)}", "--format=csv,noheader,nounits")
"""For a driver that does not know all of the fields: it then answers none of them."""

Run = Callable[[Sequence[str]], str | None]
"""A command's output, None when it is not there, fails or takes too long."""


@dataclass(frozen=True)
class Gpu:
    """power in watts, clocks in MHz, utilization in percent; None where the driver does not tell ([N/A]: a GB10 has
    no power limits, no memory of its own). slowed: why its clocks are held down, in words."""

    name: str
    compute_capability: str
    driver: str
    power_limit: float | None = None
    power_max: float | None = None
    clock: float | None = None
    clock_max: float | None = None
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
            limit, most, clock, clock_max, busy = (number(cell) for cell in cells[len(KIND) : len(KIND) + len(STATE)])
            reasons = zip(REASONS.values(), cells[len(KIND) + len(STATE) :], strict=True)
            slowed = tuple(words for words, state in reasons if state == "Active")
            name, capability, driver = cells[: len(KIND)]
            found.append(Gpu(name, capability, driver, limit, most, clock, clock_max, busy, slowed))
    return tuple(found)


def number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None

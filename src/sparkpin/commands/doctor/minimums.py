"""Numbers that the rules compare with, each with where it comes from."""

from __future__ import annotations

# CUDA Toolkit release notes (13.2 Update 2, which lists all releases), table 3 "CUDA Toolkit and Corresponding Driver
# Versions", Linux: the rows "GA". An update's own driver is newer (13.0 Update 2: 580.95.05); its PTX is the release's.
MINIMUM_DRIVER = {
    "13.0": "580.65.06",
    "12.9": "575.51.03",
    "12.8": "570.26",
}
"""CUDA release -> the driver that has all of it. What the driver itself compiles (FA2's PTX) needs it, whatever "minor
version compatibility" allows for the rest."""

CAPABILITY = "12.1"
"""Of a GB10: NVIDIA's list of CUDA GPUs."""

DOCKER = (20, 10)
"""The oldest engine that sparkpin is tested with; `--gpus` is older (19.03)."""

DOCKER_CDI = (25, 0)
"""Docker Engine 25.0 release notes: devices of the Container Device Interface (an option until 28.3)."""

BUSY = 50.0
"""Percent of utilisation from which a GPU's clock says something."""

STUCK_CLOCK = 1000.0
"""MHz. A GB10 that works runs at about 2,400; stuck in its low-power state users see 500 to 850, and no reason told,
until its power supply is unplugged (NVIDIA's forum, "Investigating 513MHz cap for GPU")."""

CACHE_SHARE = 0.05
"""Of all memory: page cache below that is not worth a line of advice."""

DRIFT = 300.0
"""Seconds: certificates and signed addresses of the Hub fail with a clock that is further off."""

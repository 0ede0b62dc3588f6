"""What is accepted although a rule objects, and why. An entry goes when its reason does."""

from __future__ import annotations

from sparkpin.inspection.finding import Allowed

DRIVER = "a part of the GPU's driver: the container toolkit brings it"

ALLOWED = (
    Allowed("needed", "*", r"libcuda\.so\.1|libnvidia-(ml|ptxjitcompiler|encode)\.so\.1|libnvcuvid\.so\.1", DRIVER),
)

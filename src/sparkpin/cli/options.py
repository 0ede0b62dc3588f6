"""Options that several tasks have."""

from __future__ import annotations

from typing import Annotated

Recipe = Annotated[str | None, "recipe of recipes/ (default: the stack's)"]
KnownRecipe = Annotated[str | None, "recipe with releases (default: the one promoted last)"]
ServedRecipe = Annotated[str | None, "recipe whose server is meant (default: the running one)"]
Stage = Annotated[str | None, "stage of stages/ (default: the recipe's)"]
Stack = Annotated[str | None, "stack of pins/stacks/ (default: the one for this machine)"]
Json = Annotated[bool, "machine-readable"]
DryRun = Annotated[bool, "print what would be done, and change nothing"]
Machines = Annotated[str | None, "for a release of several: such as here,ssh://me@spark2 (default: the last ones)"]
Link = Annotated[str | None, "interface, address or network that connects them (default: the last one, else the only)"]
SharedLink = Annotated[bool, "allow a link that other machines share (insecure)"]
Authority = Annotated[str, "PEM file of the registry's own certificate authority", "FILE"]

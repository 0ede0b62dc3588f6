"""Options that several tasks have."""

from __future__ import annotations

from typing import Annotated

Recipe = Annotated[str | None, "recipe of recipes/ (default: the stack's)"]
Stage = Annotated[str | None, "stage of stages/ (default: the recipe's)"]
Stack = Annotated[str | None, "stack of pins/stacks/ (default: the one for this machine)"]
Json = Annotated[bool, "machine-readable"]
DryRun = Annotated[bool, "print what would be done, and change nothing"]
Drain = Annotated[
    int | None, "seconds that running requests get to finish before the server is replaced (default: 30)", "SECONDS"
]
Machines = Annotated[
    str | None,
    "machines for a release that needs several, such as here,ssh://me@spark2 (default: the last ones)",
    "MACHINES",
]
Link = Annotated[
    str | None, "interface, address or network that connects them (default: the last one used, else the only one)"
]
SharedLink = Annotated[bool, "allow a link that other machines share (insecure)"]
Authority = Annotated[str, "PEM file of the registry's own certificate authority", "FILE"]

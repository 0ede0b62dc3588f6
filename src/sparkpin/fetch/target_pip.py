"""pip, resolving for another machine: `python -m sparkpin.fetch.target_pip ENVIRONMENT-JSON pip-arguments...`.

pip's --platform and --python-version choose wheels for a target, but requirement markers (`; python_version < "3.12"`)
are evaluated for the interpreter that runs pip. This gives the markers the target's environment as well.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    try:
        from pip._internal.cli.main import main as pip_main
        from pip._vendor.packaging import markers
    except ImportError as error:
        print(f"sparkpin: this Python has no usable pip: {error}", file=sys.stderr)
        return 70
    environment = json.loads(sys.argv[1])
    if set(environment) != set(markers.default_environment()):
        print("sparkpin: this pip knows other marker variables; see sparkpin.fetch.target_pip", file=sys.stderr)
        return 70
    markers.default_environment = lambda: dict(environment)
    return int(pip_main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())

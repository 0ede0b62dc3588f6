"""Does a release work? Checks of a real server; `inspect` and `load` where this machine cannot serve it."""

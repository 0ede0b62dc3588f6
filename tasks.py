"""The tasks of sparkpin, for `invoke`: they stand in src/sparkpin/cli. `sparkpin TASK` is the same from any folder."""

from sparkpin.cli.line import take_over

take_over()

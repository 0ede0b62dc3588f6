"""The command line: a file for each noun, with the tasks (sparkpin.cli.tasks) and their bodies."""

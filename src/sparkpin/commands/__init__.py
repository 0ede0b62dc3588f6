"""One file for each noun of the command line: it parses, calls one room, and prints."""

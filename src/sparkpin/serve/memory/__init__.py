"""What a recipe will need of a machine's memory, before anything is launched: from headers, config and flags alone."""

"""What every room needs: errors, files, locks, names, paths, tags, progress, the terminal. Imports nothing of ours."""

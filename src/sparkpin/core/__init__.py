"""What every room needs: errors, files, paths, disk, names, progress, the terminal. Imports nothing of ours."""

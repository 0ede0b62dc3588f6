"""Recipe and stage become an image, a checkpoint and a release: pairing, render, build, and all of it again."""

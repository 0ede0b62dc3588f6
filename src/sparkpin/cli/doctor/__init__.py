"""`invoke doctor`: what the machine has and lacks (docs/doctor.md). `facts` reads, `rules` judge what was read."""

"""Planning: memory, FLOPs, traffic and time of a run by formula, and the search of layouts."""

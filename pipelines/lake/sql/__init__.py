"""A lake in SQL: the index, what a user may ask, and choosing trajectories by it."""

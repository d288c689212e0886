"""What is printed: results as text or JSON, tables, trees, drawings of trajectories, and progress."""

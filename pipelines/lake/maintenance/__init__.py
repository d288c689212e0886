"""What keeps a lake in shape: checking, repairing, rewriting, expiring, protecting, copying."""

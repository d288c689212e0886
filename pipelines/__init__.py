"""The engine of amago: silent, typed and importable; it reports through events and returns results."""

"""Parts of the generality benchmark (`benchmarks/general.py`)."""

"""Agents of AMAGO whose outputs are known: `golden/NAME.npz`, written by `make`, and the numbers that both share."""

"""The command line of amago: the only layer that reads arguments, prints and exits."""

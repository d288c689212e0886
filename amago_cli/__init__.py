"""The command line of amago: the only layer that reads arguments, prints and exits."""

import os
import sys

if os.name != "posix":  # locks, signals and worker processes are those of POSIX
    print("error: amago runs on Linux and macOS; on Windows use it in WSL 2", file=sys.stderr)
    sys.exit(2)

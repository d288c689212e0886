"""`python -m amago_cli`: the same as `amago`; the guard detects a `pipelines` folder that shadows ours."""

import sys

from amago_cli.app import main

if __name__ == "__main__":
    sys.exit(main())

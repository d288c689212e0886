"""`python -m amago_cli`: the same as `amago`; the guard tells when a `pipelines` folder here shadows ours."""

import sys

from amago_cli.app import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m src.run ...`: the command of a checkout, the same as `attnlab ...`."""

import sys

from attnlab.__main__ import main

if __name__ == "__main__":
    sys.exit(main())

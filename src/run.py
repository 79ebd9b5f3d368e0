"""`python -m src.run ...`: the command of a checkout, the same as `attnlab ...`."""

import os
import sys

SOURCES = os.path.dirname(os.path.abspath(__file__))  # come before an installed attnlab, here and in started processes
sys.path.insert(0, SOURCES)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SOURCES, os.environ.get("PYTHONPATH"))))

from attnlab.__main__ import main  # noqa: E402

if __name__ == "__main__":
    main()

"""python -m tests.golden [RUN ...]: write the losses of the golden runs again, after a change that must alter them."""

import sys
import tempfile
from pathlib import Path

from tests.golden.runs import RUNS, file, losses

for name in sys.argv[1:] or RUNS:
    with tempfile.TemporaryDirectory() as directory:
        values = losses(name, Path(directory))
    file(name).write_text("".join(f"{loss:.6f}\n" for loss in values))
    print(f"{file(name)}: {len(values)} updates, {values[0]:.4f} to {values[-1]:.4f}", file=sys.stderr)

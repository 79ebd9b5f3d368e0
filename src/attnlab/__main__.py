"""`python -m attnlab ...`, and the command `attnlab`."""

import os
import sys


def main() -> int:
    """Run the command line in `sys.argv`; the exit code.

    Until a run begins (:mod:`attnlab.run.processes`), SIGINT ends the process at once with 130: an exception inside an
    import would be printed.
    """
    try:
        import signal

        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not ignored, as by nohup
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
        from attnlab.cli import main as command
    except KeyboardInterrupt:  # while `signal` itself was imported
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m attnlab ...`, and the command `attnlab`."""

import os
import sys


def main() -> None:
    """Run the command line in `sys.argv`, and end the process with its exit code.

    Until a run begins (:mod:`attnlab.run.processes`), SIGINT ends the process at once with 130: an exception inside an
    import would be printed. The garbage collector is off until then, because it would visit every import in vain.
    The process does not wait for the end of libraries, which takes seconds. A standard stream that is closed (`>&-`)
    becomes /dev/null: the next file that is opened would get its number, and what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            file = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(file, "r" if number == 0 else "w"))
    try:
        import gc
        import signal

        gc.disable()
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not ignored, as by nohup
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
        from attnlab.cli import command, leave
    except KeyboardInterrupt:  # while `signal` itself was imported
        os._exit(130)
    leave(command())


if __name__ == "__main__":
    main()

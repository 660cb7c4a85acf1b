"""`hetero-pp` and `python -m hetero_pp`."""

import os

from hetero_pp.program.interrupts import keep_exit_code, leave_when_interrupted


def main() -> None:
    """Run the command line."""
    leave_when_interrupted()
    from hetero_pp.program.cli import app
    from hetero_pp.program.report.encoding import make_printable

    # Else whoever connects and has no certificate writes lines into what is printed, as many as it likes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    make_printable()
    try:
        app()
    finally:
        keep_exit_code()


if __name__ == "__main__":
    main()

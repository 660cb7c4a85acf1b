"""Entry point of `hetero-pp` and `python -m hetero_pp`."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the working folder, which `python -m` puts before the standard library

from hetero_pp.program.interrupts import keep_exit_code, leave_when_interrupted


def main() -> None:
    """Run the command line."""
    leave_when_interrupted()
    os.environ["PYTHONSAFEPATH"] = "1"  # no Python that this program starts imports from the working folder
    # Otherwise gRPC prints a line for every client that connects without a certificate, at an unlimited rate.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if sys.argv[1:2] == ["launch"]:
        from hetero_pp.program.launch.fork_server import begin_imports

        begin_imports(sys.argv[2:])
    from hetero_pp.program.cli import app
    from hetero_pp.program.report.encoding import make_printable

    make_printable()
    try:
        app()
    finally:
        keep_exit_code()


if __name__ == "__main__":
    main()

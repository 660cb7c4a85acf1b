"""`hetero-pp` and `python -m hetero_pp`."""

import os

from hetero_pp.program.cli import app


def main() -> None:
    """Run the command line."""
    # Else whoever connects and has no certificate writes lines into what is printed, as many as it likes.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app()


if __name__ == "__main__":
    main()

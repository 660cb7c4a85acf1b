"""`hetero-pp` and `python -m hetero_pp`."""

from hetero_pp.program.cli import app


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()

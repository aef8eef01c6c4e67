"""The command ``fastgen``, also as ``python -m fastgen``."""

import sys


def main() -> None:
    """Runs the command line. Ctrl-C ends it without a traceback while it is imported, too."""
    try:
        from fastgen.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # as in the commands themselves
    run()


if __name__ == "__main__":
    main()

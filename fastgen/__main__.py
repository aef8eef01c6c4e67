"""``python -m fastgen``: the command line."""

from fastgen.cli import main

main()

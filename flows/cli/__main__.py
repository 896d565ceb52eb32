"""`python -m flows.cli` is `tba`."""

from flows.cli.app import main

main()

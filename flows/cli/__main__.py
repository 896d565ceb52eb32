"""`python -m flows.cli` is `tba`."""

from flows.cli.train import main

main()

"""`python -m rlboost`."""

from rlboost.cli import main

main()

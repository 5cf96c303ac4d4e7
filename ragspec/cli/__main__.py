"""`python -m ragspec.cli` is `ragspec`."""

from ragspec.cli import main

main()

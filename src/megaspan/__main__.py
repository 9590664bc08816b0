"""`python -m megaspan` is the `megaspan` command."""

from megaspan.cli import main

main()

"""`python -m qatpack.cli`."""

from . import main

main()

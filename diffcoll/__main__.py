"""`python -m diffcoll` is the command `diffcoll`."""

import sys

from diffcoll.cli import main

sys.exit(main())

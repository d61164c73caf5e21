"""`python -m weft`: the same as the `weft` command."""

import sys

from weft.cli import main

sys.exit(main())

"""`python -m propolis` is `propolis`."""

from __future__ import annotations

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    # `python -m` looks for modules in the working directory first; the app's is looked for there last.
    del sys.path[0]

from propolis.cli import main  # after the path is mended

if __name__ == "__main__":
    main(prog_name="propolis")

"""`python -m propolis.testing.servers`: see `serving`."""

from __future__ import annotations

from propolis.testing.servers.serving import main

if __name__ == "__main__":
    main()

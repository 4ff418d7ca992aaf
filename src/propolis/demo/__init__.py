"""The demo: `python -m propolis.demo`."""

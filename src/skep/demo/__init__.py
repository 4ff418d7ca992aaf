"""The demo: `python -m skep.demo`."""

"""propolis together with what others have made: each is one line to switch on, and an extra to install."""

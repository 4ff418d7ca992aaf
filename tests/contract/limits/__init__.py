"""What limits do by the app, on every engine."""

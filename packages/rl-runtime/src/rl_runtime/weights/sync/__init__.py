"""Ways of sending weights to the engines."""

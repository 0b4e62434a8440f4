"""Where metrics go and what a person sees."""

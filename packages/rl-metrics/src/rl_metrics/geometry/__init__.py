"""Which context-parallel rank owns which token, and where it lies there."""

"""A stand-in, as small as the calls that are made."""

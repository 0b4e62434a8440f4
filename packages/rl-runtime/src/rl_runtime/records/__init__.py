"""The records between a prompt and a batch."""

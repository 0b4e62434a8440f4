"""What has to be right, and made, before a run starts."""

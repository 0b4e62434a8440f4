"""Parts of Ray that are not public."""

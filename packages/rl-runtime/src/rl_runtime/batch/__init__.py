"""From scored groups to one part per data-parallel rank."""

"""What one does with dumps: match, compare, summarise, look for trouble, convert, show as a page."""

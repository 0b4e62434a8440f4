"""What one does with dumps: match, compare, summarise, check, convert, show as a page."""

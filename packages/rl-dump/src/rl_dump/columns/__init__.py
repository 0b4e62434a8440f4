"""What a dump holds per field: variable-length arrays, column types, exact JSON for the rest."""

"""From scored groups to one `RankBatch` for each data-parallel rank."""

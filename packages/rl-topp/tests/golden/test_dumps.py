"""The frozen dumps of rl-dump, as this package reads them; their bytes are compared elsewhere."""

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
from rl_topp import parquet

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("contract", sorted(parquet.READABLE_CONTRACTS))
def test_every_contract_that_is_read_has_frozen_files(contract: str) -> None:
    files = sorted((FOLDER / contract).glob("*.parquet"))
    assert files
    for path in files:
        figures = parquet.stats_of_dump(path)
        # Four trained tokens: three with sets of 1, 2 and 3 ids, one without a filter.
        assert (figures.num_tokens, figures.num_kept, figures.num_no_filter) == (4, 3, 1)
        assert figures.mean_size == 2.0

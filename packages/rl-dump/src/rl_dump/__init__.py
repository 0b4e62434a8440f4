"""What was trained on, sample by sample."""

from rl_dump.errors import DumpError, RaggedError, UnsupportedContractError, WriteError
from rl_dump.ragged import RaggedArray

__all__ = ["DumpError", "RaggedArray", "RaggedError", "UnsupportedContractError", "WriteError"]

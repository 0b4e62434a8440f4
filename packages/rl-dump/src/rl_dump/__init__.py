"""What was trained on, sample by sample."""

from rl_dump.background import BackgroundWriter
from rl_dump.checks import Problem
from rl_dump.columns.ragged import RaggedArray
from rl_dump.contract import RESPONSE_FIELDS, ROLLOUT_DUMP, TRAIN_DUMP
from rl_dump.errors import DumpError, RaggedError, UnsupportedContractError, WriteError
from rl_dump.parquet.writer import DumpWriter, write_dump
from rl_dump.reader import Dump, open_dump
from rl_dump.templates import check_templates, resolve_template
from rl_dump.tools.compare import Difference, compare
from rl_dump.tools.convert import convert
from rl_dump.tools.doctor import Alarm, Thresholds, doctor
from rl_dump.tools.html import write_html
from rl_dump.tools.join import Join, Missing, Pair, join
from rl_dump.tools.replay import REPLAY_KEY, export_micro_batch
from rl_dump.tools.summary import BatchSummary, FieldSummary, summary, trend

__all__ = [
    "REPLAY_KEY",
    "RESPONSE_FIELDS",
    "ROLLOUT_DUMP",
    "TRAIN_DUMP",
    "Alarm",
    "BackgroundWriter",
    "BatchSummary",
    "Difference",
    "Dump",
    "DumpError",
    "DumpWriter",
    "FieldSummary",
    "Join",
    "Missing",
    "Pair",
    "Problem",
    "RaggedArray",
    "RaggedError",
    "Thresholds",
    "UnsupportedContractError",
    "WriteError",
    "check_templates",
    "compare",
    "convert",
    "doctor",
    "export_micro_batch",
    "join",
    "open_dump",
    "resolve_template",
    "summary",
    "trend",
    "write_dump",
    "write_html",
]

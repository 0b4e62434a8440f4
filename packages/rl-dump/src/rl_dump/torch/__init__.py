"""Train dumps from torch: whole responses again, one file of all ranks, log-probs kept."""

from rl_dump.torch.archive import write_torch_archive
from rl_dump.torch.capture import LogProbCapture
from rl_dump.torch.restore import GatherTensor, restore_context_parallel_fields_to_cpu
from rl_dump.torch.save import save_debug_train_data
from rl_dump.torch.topology import DumpTopology

__all__ = [
    "DumpTopology",
    "GatherTensor",
    "LogProbCapture",
    "restore_context_parallel_fields_to_cpu",
    "save_debug_train_data",
    "write_torch_archive",
]

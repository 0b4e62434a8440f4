"""What each hooked function of SGLang does besides its own work. Layer: engine; runs inside SGLang's processes.

How a request's wish reaches its reply: `flag_rows` reads it from the requests when a batch is formed; `filter_flags`, `merge_flags` and `copy_flags` keep
the flags beside the batch; `sample_from_kept_set` computes the sets, samples, and leaves a `StepRows` on the batch's sampling info;
`sample_and_record` hands that to the step's output; `copy_to_host` starts the copy; `collect` appends one element per token to the request's
`customized_info`, which SGLang carries to `meta_info`.

Invariants: without a flagged row the hooked function runs alone; the flags have one entry per row of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rl_topp.sglang_plugin import KEPT_IDS_KEY, KEPT_LOG_PROBS_KEY, OPT_IN_KEY
from rl_topp.sglang_plugin_kept import Filters, find_kept, listed_ids, sample, sample_all
from rl_topp.sglang_plugin_step import WHOLE_VOCABULARY, StepRows, pack

__all__ = [
    "RowFlags",
    "collect",
    "copy_flags",
    "copy_to_host",
    "filter_flags",
    "flag_rows",
    "merge_flags",
    "refuse_unsupported",
    "sample_and_record",
    "sample_from_kept_set",
]

_FLAGS = "rl_topp_flags"
"""Attribute of `SamplingBatchInfo` that holds the `RowFlags`."""

_STEP = "rl_topp_step"
"""Attribute of `SamplingBatchInfo` and of `LogitsProcessorOutput` that holds the `StepRows` of a step."""

_Original = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RowFlags:
    """Host-side facts of each row of a batch, so that no step has to ask the device."""

    record: tuple[bool, ...]
    """Whether the row's request asked for its kept sets."""
    filtered: tuple[bool, ...]
    """Whether top-k, top-p or min-p can cut ids of the row."""
    any_record: bool = field(init=False)
    """Whether any row is recorded."""

    def __post_init__(self) -> None:
        """Fill `any_record`."""
        object.__setattr__(self, "any_record", any(self.record))


def flag_rows(original: _Original, cls: type, batch: Any, vocab_size: int) -> Any:
    """`SamplingBatchInfo.from_schedule_batch`: note which requests ask, and which have a filter."""
    info = original(cls, batch, vocab_size)
    params = [request.sampling_params for request in batch.reqs]
    flags = RowFlags(
        record=tuple(_asks(one.custom_params) for one in params),
        filtered=tuple(one.top_p < 1.0 or one.top_k < vocab_size or one.min_p > 0.0 for one in params),
    )
    setattr(info, _FLAGS, flags)
    return info


def filter_flags(original: _Original, info: Any, keep_indices: Sequence[int], keep_indices_device: Tensor) -> Any:
    """`SamplingBatchInfo.filter_batch`: keep the flags of the rows that stay."""
    flags = _flags_of(info)
    result = original(info, keep_indices, keep_indices_device)
    setattr(
        info, _FLAGS, RowFlags(record=tuple(flags.record[i] for i in keep_indices), filtered=tuple(flags.filtered[i] for i in keep_indices))
    )
    return result


def merge_flags(original: _Original, info: Any, other: Any) -> Any:
    """`SamplingBatchInfo.merge_batch`: append the other batch's flags."""
    mine, theirs = _flags_of(info), _flags_of(other)
    result = original(info, other)
    setattr(info, _FLAGS, RowFlags(record=mine.record + theirs.record, filtered=mine.filtered + theirs.filtered))
    return result


def copy_flags(original: _Original, info: Any) -> Any:
    """`SamplingBatchInfo.copy_for_forward`: the overlap scheduler's copy drops attributes that are no fields."""
    copy = original(info)
    setattr(copy, _FLAGS, _flags_of(info))
    return copy


def sample_and_record(original: _Original, sampler: Any, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> Any:
    """`Sampler.forward`: sample as ever, then hang the step's kept sets on its output.

    Raises:
        RuntimeError: the flags do not match the rows, so some way of forming batches was not hooked.
    """
    flags: RowFlags | None = getattr(sampling_info, _FLAGS, None)
    if flags is None or not flags.any_record:
        return original(sampler, logits_output, sampling_info, *args, **kwargs)
    num_rows = logits_output.next_token_logits.shape[0]
    if len(flags.record) != num_rows:
        msg = f"rl-topp: {len(flags.record)} row flags for a batch of {num_rows} rows; this SGLang forms batches in a way that the plugin does not know"
        raise RuntimeError(msg)
    setattr(sampling_info, _STEP, None)
    ids_B = original(sampler, logits_output, sampling_info, *args, **kwargs)
    step = getattr(sampling_info, _STEP)
    # Only an all-greedy batch samples without `_sample_from_probs` (the other ways are refused per request): its sets are the sampled ids themselves.
    setattr(logits_output, _STEP, step if step is not None else _greedy_rows(ids_B))
    return ids_B


def sample_from_kept_set(
    original: _Original, sampler: Any, probs_BV: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
) -> Tensor:
    """`Sampler._sample_from_probs`: find the kept sets, sample from them, and note both."""
    flags: RowFlags | None = getattr(sampling_info, _FLAGS, None)
    if flags is None or not flags.any_record:
        result: Tensor = original(sampler, probs_BV, sampling_info, positions, simple_sampling_case)
        return result
    ids_B, step = _sample_rows(probs_BV, sampling_info, positions, flags)
    setattr(sampling_info, _STEP, step)
    return ids_B


def copy_to_host(original: _Original, result: Any, *args: Any, **kwargs: Any) -> Any:
    """`GenerationBatchResult.copy_to_cpu` (overlap scheduler): start our one copy before the event that marks all copies done."""
    step: StepRows | None = getattr(result.logits_output, _STEP, None)
    if step is not None:
        from sglang.srt.managers.utils import _async_d2h

        step.start_copy(_async_d2h)
    return original(result, *args, **kwargs)


def collect(original: _Original, processor: Any, i: int, req: Any, logits_output: Any) -> Any:
    """`_maybe_collect_customized_info`: append the new token's kept set to its request."""
    step: StepRows | None = getattr(logits_output, _STEP, None)
    if step is not None and _asks(req.sampling_params.custom_params):
        if req.customized_info is None:
            req.customized_info = {}
        ids, log_prob = step.row(i)
        req.customized_info.setdefault(KEPT_IDS_KEY, []).append(ids)
        req.customized_info.setdefault(KEPT_LOG_PROBS_KEY, []).append(log_prob)
    return original(processor, i, req, logits_output)


def refuse_unsupported(original: _Original, manager: Any, obj: Any, input_ids: Any) -> Any:
    """`TokenizerManager._validate_one_request`: answer 400 where kept sets were asked for and this server cannot record them.

    Raises:
        ValueError: the server uses something that bypasses the hooked sampler; the message names it.
    """
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, dict) and _asks(params.get("custom_params")):
        reasons = unsupported_features(manager.server_args)
        if reasons:
            msg = f"{OPT_IN_KEY}: rl-topp cannot record kept sets on this server, which uses {', '.join(reasons)}; start it without, or do not ask"
            raise ValueError(msg)
    return original(manager, obj, input_ids)


def unsupported_features(server_args: Any) -> list[str]:
    """Return the features of a server that bypass the hooked sampler or drop what it records, in words; empty when there are none."""
    found = {
        f"speculative decoding ({server_args.speculative_algorithm})": server_args.speculative_algorithm is not None,
        "prefill-decode disaggregation": server_args.disaggregation_mode != "null",
        "pipeline parallelism": server_args.pp_size > 1,
        "rl_on_policy_target": server_args.rl_on_policy_target is not None,
        f"the sampling backend {server_args.sampling_backend}": server_args.sampling_backend not in {"pytorch", "flashinfer"},
    }
    return [words for words, is_used in found.items() if is_used]


def _asks(custom_params: Any) -> bool:
    """Whether a request's `custom_params` opt in."""
    return isinstance(custom_params, dict) and custom_params.get(OPT_IN_KEY) is True


def _flags_of(info: Any) -> RowFlags:
    """Return the flags of a sampling info; one that was made past `from_schedule_batch` records nothing."""
    flags: RowFlags | None = getattr(info, _FLAGS, None)
    return flags if flags is not None else RowFlags(record=(False,) * len(info), filtered=(True,) * len(info))


def _sample_rows(probs_BV: Tensor, info: Any, positions_B: Tensor, flags: RowFlags) -> tuple[Tensor, StepRows]:
    """Sample each row from its kept set, or from the whole vocabulary where it has no filter."""
    num_rows, device, seeds_B = probs_BV.shape[0], probs_BV.device, info.sampling_seed
    ids_B = torch.empty(num_rows, dtype=torch.int32, device=device)
    log_probs_B = torch.empty(num_rows, dtype=torch.float32, device=device)
    counts_B = torch.full((num_rows,), WHOLE_VOCABULARY, dtype=torch.int64, device=device)
    listed_N = ids_B[:0]
    for is_filtered in (False, True):
        chosen = [row for row in range(num_rows) if flags.filtered[row] is is_filtered]
        if not chosen:
            continue
        # A slice where it can be one: no copy of the probabilities when every row has a filter.
        rows = slice(None) if len(chosen) == num_rows else _to_device(chosen, device)
        probs_RV = probs_BV[rows]
        draw = _drawer(None if seeds_B is None else seeds_B[rows], positions_B[rows])
        if is_filtered:
            kept = find_kept(probs_RV, _filters_of(info, rows))
            ids_B[rows], log_probs_B[rows] = sample(kept, draw)
            listed = [flags.record[row] for row in chosen]
            counts_R = kept.counts_B if all(listed) else kept.counts_B * _to_device(listed, device)
            counts_B[rows], listed_N = counts_R, listed_ids(kept, counts_R)
        else:
            ids_B[rows], log_probs_B[rows] = sample_all(probs_RV, draw)
    return ids_B, StepRows(pack(counts_B, log_probs_B, listed_N), num_rows)


def _drawer(seeds_B: Tensor | None, positions_B: Tensor) -> Callable[[Tensor], Tensor]:
    """Return SGLang's way to draw an index per row: its seeded one where the server is deterministic, else `torch.multinomial`."""
    if seeds_B is None:
        return lambda weights_BK: torch.multinomial(weights_BK, num_samples=1)
    from sglang.srt.layers.sampler import multinomial_with_seed

    return lambda weights_BK: multinomial_with_seed(weights_BK.double().log_(), seeds_B, positions_B)


def _filters_of(info: Any, rows: Tensor | slice) -> Filters:
    """Return the filters of some rows of a sampling info."""
    return Filters(top_ks=info.top_ks[rows], top_ps=info.top_ps[rows], min_ps=info.min_ps[rows] if info.need_min_p_sampling else None)


def _greedy_rows(ids_B: Tensor) -> StepRows:
    """Return the record of an all-greedy batch: each set is the sampled id, with log-prob 0."""
    ones_B = torch.ones_like(ids_B)
    return StepRows(pack(ones_B, torch.zeros_like(ids_B, dtype=torch.float32), ids_B), ids_B.shape[0])


def _to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy host integers or flags to the device without waiting for it."""
    host = torch.tensor(values, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)

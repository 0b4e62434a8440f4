"""What each hooked function of SGLang does besides its own work.

How a request's wish reaches its reply: `flag_rows` reads it from the requests when a batch is
formed; `filter_flags`, `merge_flags` and `copy_flags` keep the flags beside the batch;
`sample_from_nucleus` computes the sets, samples, and leaves a `DrawnStep` on the batch's sampling
info; `sample_and_record` hands it to the step's output as `StepRows`; `copy_to_host` starts the
copy; `collect` appends one element per token to the request's `customized_info`, which SGLang
carries to `meta_info`.

Axes: B rows of a batch.

Invariants: without a flagged row the hooked function runs alone; the flags have one entry per row
of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_topp.sglang.draw import Draw, Filters, draw_step
from rl_topp.sglang.keys import KEPT_IDS_KEY, KEPT_LOG_PROBS_KEY, OPT_IN_KEY
from rl_topp.sglang.step import (
    COUNT,
    IDS,
    LOG_PROB,
    WHOLE_VOCABULARY,
    DrawnStep,
    StepRows,
    empty_step,
)

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
    "sample_from_nucleus",
]

_FLAGS = "rl_topp_flags"
"""Attribute of `SamplingBatchInfo` that holds the `RowFlags`."""

_STEP = "rl_topp_step"
"""Attribute that holds a step.

On `SamplingBatchInfo` it is the `DrawnStep`, on `LogitsProcessorOutput` the `StepRows`.
"""

_Original = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RowFlags:
    """Host-side facts of each row of a batch, so that no step has to ask the device."""

    record: tuple[bool, ...]
    """Whether the row's request asked for its kept sets."""
    filtered: tuple[bool, ...]
    """Whether top-k, top-p or min-p can cut ids of the row."""

    @property
    def any_record(self) -> bool:
        """Whether any row is recorded."""
        return any(self.record)


def flag_rows(original: _Original, cls: type, batch: Any, vocab_size: int) -> Any:
    """Note which requests ask and which have a filter; wraps `from_schedule_batch`."""
    info = original(cls, batch, vocab_size)
    params = [request.sampling_params for request in batch.reqs]
    flags = RowFlags(
        record=tuple(_asks(one.custom_params) for one in params),
        filtered=tuple(
            one.top_p < 1.0 or one.top_k < vocab_size or one.min_p > 0.0 for one in params
        ),
    )
    setattr(info, _FLAGS, flags)
    return info


def filter_flags(
    original: _Original, info: Any, keep_indices: Sequence[int], keep_indices_device: Tensor
) -> Any:
    """Keep the flags of the rows that stay; wraps `SamplingBatchInfo.filter_batch`."""
    flags = _flags_of(info)
    result = original(info, keep_indices, keep_indices_device)
    setattr(
        info,
        _FLAGS,
        RowFlags(
            record=tuple(flags.record[i] for i in keep_indices),
            filtered=tuple(flags.filtered[i] for i in keep_indices),
        ),
    )
    return result


def merge_flags(original: _Original, info: Any, other: Any) -> Any:
    """Append the other batch's flags; wraps `SamplingBatchInfo.merge_batch`."""
    mine, theirs = _flags_of(info), _flags_of(other)
    result = original(info, other)
    setattr(
        info,
        _FLAGS,
        RowFlags(record=mine.record + theirs.record, filtered=mine.filtered + theirs.filtered),
    )
    return result


def copy_flags(original: _Original, info: Any) -> Any:
    """Copy the flags, which SGLang does not know; wraps `SamplingBatchInfo.copy_for_forward`."""
    copy = original(info)
    setattr(copy, _FLAGS, _flags_of(info))
    return copy


def sample_and_record(
    original: _Original,
    sampler: Any,
    logits_output: Any,
    sampling_info: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Sample as ever, then hang the step's kept sets on the output; wraps `Sampler.forward`.

    Raises:
        RuntimeError: the flags do not match the rows, so some way of forming batches was not
            hooked.
    """
    flags: RowFlags | None = getattr(sampling_info, _FLAGS, None)
    if flags is None or not flags.any_record:
        return original(sampler, logits_output, sampling_info, *args, **kwargs)
    num_rows = logits_output.next_token_logits.shape[0]
    if len(flags.record) != num_rows:
        raise RuntimeError(
            f"rl-topp: {len(flags.record)} row flags for a batch of {num_rows} rows; this SGLang"
            " forms batches in a way that the plugin does not know"
        )
    setattr(sampling_info, _STEP, None)
    ids_B = original(sampler, logits_output, sampling_info, *args, **kwargs)
    step = getattr(sampling_info, _STEP)
    if step is None:
        # Only an all-greedy batch samples without `_sample_from_probs` (the other ways are refused
        # per request): its sets are the sampled ids themselves, with log-prob 0.
        step = _step_of_ids(ids_B, 1, torch.zeros_like(ids_B, dtype=torch.float32))
    setattr(logits_output, _STEP, StepRows(step, flags.record))
    return ids_B


def sample_from_nucleus(
    original: _Original,
    sampler: Any,
    probs_BV: Tensor,
    sampling_info: Any,
    positions: Tensor,
    simple_sampling_case: bool,
) -> Any:
    """Find the kept sets, sample from them, note both; wraps `Sampler._sample_from_probs`."""
    flags: RowFlags | None = getattr(sampling_info, _FLAGS, None)
    if flags is None or not flags.any_record:
        return original(sampler, probs_BV, sampling_info, positions, simple_sampling_case)
    if simple_sampling_case:
        ids_B: Tensor = original(sampler, probs_BV, sampling_info, positions, simple_sampling_case)
        drawn_B = probs_BV.gather(1, ids_B.long().view(-1, 1)).view(-1)
        step = _step_of_ids(ids_B, WHOLE_VOCABULARY, torch.log(drawn_B.float()))
    else:
        step = _draw(probs_BV.float(), sampling_info, positions, flags)
    setattr(sampling_info, _STEP, step)
    return step.ids_B


def copy_to_host(original: _Original, result: Any, *args: Any, **kwargs: Any) -> Any:
    """Start our one copy under the overlap scheduler; wraps `GenerationBatchResult.copy_to_cpu`."""
    # Before the original, which records the event that marks all copies as done.
    step: StepRows | None = getattr(result.logits_output, _STEP, None)
    if step is not None:
        from sglang.srt.managers.utils import _async_d2h

        step.start_copy(_async_d2h)
    return original(result, *args, **kwargs)


def collect(original: _Original, processor: Any, i: int, req: Any, logits_output: Any) -> Any:
    """Append the new token's kept set to its request; wraps `_maybe_collect_customized_info`."""
    step: StepRows | None = getattr(logits_output, _STEP, None)
    if step is not None and _asks(req.sampling_params.custom_params):
        if req.customized_info is None:
            req.customized_info = {}
        for key, value in zip((KEPT_IDS_KEY, KEPT_LOG_PROBS_KEY), step.row(i), strict=True):
            req.customized_info.setdefault(key, []).append(value)
    return original(processor, i, req, logits_output)


def refuse_unsupported(original: _Original, manager: Any, obj: Any, input_ids: Any) -> Any:
    """Answer 400 where this server cannot record sets.

    Wraps `TokenizerManager._validate_one_request`.

    Raises:
        ValueError: the server uses something that bypasses the hooked sampler; the message names
            it.
    """
    params = getattr(obj, "sampling_params", None)
    if isinstance(params, dict) and _asks(params.get("custom_params")):
        reasons = unsupported_features(manager.server_args)
        if reasons:
            raise ValueError(
                f"{OPT_IN_KEY}: rl-topp cannot record kept sets on this server, which uses"
                f" {', '.join(reasons)}; start it without, or do not ask"
            )
    return original(manager, obj, input_ids)


def unsupported_features(server_args: Any) -> list[str]:
    """Return in words what a server uses that bypasses the hooked sampler or drops its records."""
    found = {
        f"speculative decoding ({server_args.speculative_algorithm})": (
            server_args.speculative_algorithm is not None
        ),
        "prefill-decode disaggregation": server_args.disaggregation_mode != "null",
        "pipeline parallelism": server_args.pp_size > 1,
        "rl_on_policy_target": server_args.rl_on_policy_target is not None,
        f"the sampling backend {server_args.sampling_backend}": (
            server_args.sampling_backend not in {"pytorch", "flashinfer"}
        ),
    }
    return [words for words, is_used in found.items() if is_used]


def _asks(custom_params: Any) -> bool:
    """Say whether a request's `custom_params` opt in."""
    return isinstance(custom_params, dict) and custom_params.get(OPT_IN_KEY) is True


def _flags_of(info: Any) -> RowFlags:
    """Return the flags of a sampling info; one made past `from_schedule_batch` records nothing."""
    flags: RowFlags | None = getattr(info, _FLAGS, None)
    return flags or RowFlags(record=(False,) * len(info), filtered=(True,) * len(info))


def _draw(probs_BV: Tensor, info: Any, positions_B: Tensor, flags: RowFlags) -> DrawnStep:
    """Sample each row from its kept set, or from the whole vocabulary where it has no filter."""
    filters = Filters(
        top_ks=info.top_ks,
        top_ps=info.top_ps,
        min_ps=info.min_ps if info.need_min_p_sampling else None,
    )
    if probs_BV.is_cuda:
        from rl_topp.sglang.kernels import draw_step_on_device

        is_filtered_B = None if all(flags.filtered) else _to_device(flags.filtered, probs_BV.device)
        return draw_step_on_device(
            probs_BV, filters, _uniform(probs_BV, info.sampling_seed, positions_B), is_filtered_B
        )
    return draw_step(probs_BV, filters, flags.filtered, _drawer(info.sampling_seed, positions_B))


def _drawer(seeds_B: Tensor | None, positions_B: Tensor) -> Draw:
    """Return SGLang's way to draw an index per row: seeded where the server is deterministic."""
    if seeds_B is None:
        return lambda weights_RN, _: torch.multinomial(weights_RN, num_samples=1)
    from sglang.srt.layers.sampler import multinomial_with_seed

    return lambda weights_RN, rows: multinomial_with_seed(
        weights_RN.double().log_(), seeds_B[rows], positions_B[rows]
    )


def _uniform(probs_BV: Tensor, seeds_B: Tensor | None, positions_B: Tensor) -> Tensor:
    """Return a number in [0, 1) per row, by seed and position where the server is deterministic."""
    if seeds_B is None:
        return torch.rand(probs_BV.shape[0], device=probs_BV.device)
    from sglang.srt.layers.utils.hash import murmur_hash32

    hashed_B: Tensor = murmur_hash32(
        seeds_B.to(torch.uint64),
        positions_B,
        torch.zeros(1, dtype=torch.int64, device=probs_BV.device),
    ).view(-1)
    # 24 bits, so that float32 holds them exactly and never rounds up to 1.
    return (hashed_B.to(torch.int64) >> 8).to(torch.float32) / 2**24


def _step_of_ids(ids_B: Tensor, count: int, log_probs_B: Tensor) -> DrawnStep:
    """Return the step of a batch that SGLang itself sampled; each set holds one id, or all."""
    _, packed_BC, prefix_BK = empty_step(ids_B.shape[0], 1, ids_B.device)
    packed_BC[:, COUNT] = count
    packed_BC[:, LOG_PROB] = log_probs_B.view(torch.int32)
    packed_BC[:, IDS] = ids_B
    return DrawnStep(ids_B=ids_B, packed_BC=packed_BC, prefix_BK=prefix_BK)


def _to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy host integers or flags to the device without waiting for it."""
    host = torch.tensor(values, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)

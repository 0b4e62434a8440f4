"""The SGLang plugin: entry point, version guard and table of hooks.

SGLang calls `register` once in every process that it starts (entry-point group
`sglang.srt.plugins`). A request asks by `sampling_params.custom_params`; the reply's `meta_info`
then holds, for each of its tokens, the ids that the sampler could pick and the log-prob over them.

Invariants: a batch in which nobody asks runs SGLang's own code; greedy rows give SGLang's own
tokens; an id is sampled from exactly the set that is returned; SGLang's `output_token_logprobs`
stay what they are (over the vocabulary, before truncation); no engine is imported before `register`
runs, since SGLang loads this in processes that never sample.
"""

# POST /generate {"input_ids": [...], "sampling_params": {"top_p": 0.9, "custom_params":
#     {"return_top_p_token_ids": true}}}
# -> meta_info["rl_topp_kept_ids"]        a list of ids per token; null = no filter, the vocabulary
#    meta_info["rl_topp_kept_log_probs"]  a number per token, nats, at the request's temperature
# A request that does not ask may carry both keys, null for every token, when it shared a batch
# with one that did.

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil

__all__ = [
    "HOOKED",
    "TESTED_VERSIONS",
    "UnsupportedSGLangError",
    "installed_version",
    "register",
    "require_installed",
    "signature_problems",
]

TESTED_VERSIONS = ("0.5.15.post1",)
"""SGLang versions that the hooks were tested with."""

_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"

HOOKED: dict[str, tuple[str, tuple[str, ...]]] = {
    f"{_SAMPLING}.from_schedule_batch": ("flag_rows", ("batch", "vocab_size")),
    f"{_SAMPLING}.filter_batch": ("filter_flags", ("self", "keep_indices", "keep_indices_device")),
    f"{_SAMPLING}.merge_batch": ("merge_flags", ("self", "other")),
    f"{_SAMPLING}.copy_for_forward": ("copy_flags", ("self",)),
    f"{_SAMPLER}.forward": (
        "sample_and_record",
        (
            "self",
            "logits_output",
            "sampling_info",
            "return_logprob",
            "top_logprobs_nums",
            "token_ids_logprobs",
            "positions",
        ),
    ),
    f"{_SAMPLER}._sample_from_probs": (
        "sample_from_nucleus",
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
    ),
    "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu": (
        "copy_to_host",
        ("self", "return_logprob", "return_hidden_states"),
    ),
    f"{_RESULTS}.SchedulerBatchResultProcessor._maybe_collect_customized_info": (
        "collect",
        ("self", "i", "req", "logits_output"),
    ),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": (
        "refuse_unsupported",
        ("self", "obj", "input_ids"),
    ),
}
"""Hooked function -> name of our function in `hooks`, and the parameters it must have."""


class UnsupportedSGLangError(RuntimeError):
    """An SGLang of a version, or with parameters of a hooked function, that were not tested."""


def register() -> None:
    """Register every hook with SGLang, which applies them when all plugins are loaded.

    Raises:
        UnsupportedSGLangError: unknown version, or other parameters than tested; the message lists
            all of them. SGLang logs it and starts without the plugin: replies then lack the keys,
            and readers refuse them.
    """
    _refuse(signature_problems())
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rl_topp.sglang import hooks

    for target, (name, _) in HOOKED.items():
        HookRegistry.register(target, getattr(hooks, name), HookType.AROUND)


def require_installed() -> None:
    """Raise unless every hook is in place in this process.

    Raises:
        UnsupportedSGLangError: the version is unknown, a signature differs, or a function is not
            wrapped.
    """
    _refuse(
        signature_problems()
        or [
            f"{target} is not hooked: SGLang did not load the plugin (SGLANG_PLUGINS?)"
            for target in HOOKED
            if not hasattr(pkgutil.resolve_name(target), "__wrapped__")
        ]
    )


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UnsupportedSGLangError("; ".join(problems))


def installed_version() -> str | None:
    """Return the version of the installed SGLang, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def signature_problems() -> list[str]:
    """Return what keeps the plugin from working with the installed SGLang, one sentence each.

    Empty when all is well. Imports the hooked modules, hence torch.
    """
    version = installed_version()
    if version not in TESTED_VERSIONS:
        return [
            (
                f"rl-topp's plugin was tested with sglang {', '.join(TESTED_VERSIONS)}, but"
                f" {version or 'none'} is installed: install a tested one"
            )
        ]
    problems = []
    for target, (_, expected) in HOOKED.items():
        try:
            # A class method comes back bound, so its parameters start after the class.
            found = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        except (ImportError, AttributeError) as error:
            problems.append(f"{target} was not found ({error})")
            continue
        if found != expected:
            problems.append(f"{target} has parameters {found}, expected {expected}")
    return problems

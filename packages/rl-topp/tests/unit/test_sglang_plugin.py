"""The plugin without a server: version guard, bookkeeping of rows, the buffer of a step."""

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rl_topp.sglang import check, plugin

torch = pytest.importorskip("torch")
hooks = pytest.importorskip("rl_topp.sglang.hooks")
steps = pytest.importorskip("rl_topp.sglang.step")


def test_importing_the_plugin_loads_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, rl_topp.sglang.plugin; print([name for name in ('torch', 'sglang',"
        " 'numpy.random') if name in sys.modules][:2])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "torch" not in found
    assert "sglang" not in found


@pytest.mark.parametrize("version", ["0.5.14", "0.5.16", None])
def test_an_unknown_sglang_is_refused_and_the_tested_versions_are_named(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: version)
    with pytest.raises(
        plugin.UnsupportedSGLangError,
        match=r"tested with sglang 0\.5\.15\.post1, but (0\.5\.1[46]|none) is installed",
    ):
        plugin.register()


def test_every_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: plugin.TESTED_VERSIONS[0])
    monkeypatch.setattr(
        plugin,
        "HOOKED",
        {
            "json.dumps": ("x", ("obj",)),
            "json.no_such": ("x", ()),
            "no_such_module.f": ("x", ()),
            "textwrap.dedent": ("x", ("text",)),
        },
    )
    problems = plugin.signature_problems()
    assert [problem.split()[0] for problem in problems] == [
        "json.dumps",
        "json.no_such",
        "no_such_module.f",
    ]
    assert "expected ('obj',)" in problems[0]


def test_functions_that_are_not_wrapped_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: plugin.TESTED_VERSIONS[0])
    monkeypatch.setattr(plugin, "HOOKED", {"textwrap.dedent": ("x", ("text",))})
    with pytest.raises(plugin.UnsupportedSGLangError, match=r"textwrap\.dedent is not hooked"):
        plugin.require_installed()


def test_a_distribution_without_the_entry_point_is_reported_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "signature_problems", list)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert check.main() == 1
    assert "install rl-topp as a distribution" in capsys.readouterr().out


def packed_step(
    *rows: tuple[int, float, Sequence[int]], prefix: Any = None, wide: Any = None
) -> Any:
    """Make a step of (count, log-prob, head ids) rows."""
    packed = torch.zeros(len(rows), steps.NUM_COLUMNS, dtype=torch.int32)
    for row, (count, log_prob, ids) in enumerate(rows):
        packed[row, steps.COUNT] = count
        packed[row, steps.LOG_PROB] = torch.tensor(log_prob).view(torch.int32)
        packed[row, steps.IDS : steps.IDS + len(ids)] = torch.tensor(ids, dtype=torch.int32)
    prefix = torch.zeros(len(rows), 100, dtype=torch.int64) if prefix is None else prefix
    return steps.DrawnStep(
        ids_B=torch.zeros(len(rows)), packed_BC=packed, prefix_BK=prefix, wide_BW=wide
    )


def test_a_step_comes_back_as_it_was_packed_after_one_copy() -> None:
    step = steps.StepRows(
        packed_step((2, -0.5, [17, 4]), (steps.WHOLE_VOCABULARY, -3.0, []), (3, -1.25, [9, 8, 7])),
        [True] * 3,
    )
    copies = []

    def copy(array: Any) -> Any:
        copies.append(array)
        return array.clone()

    step.start_copy(copy)
    assert step.row(2) == ([9, 8, 7], -1.25)
    assert step.row(0) == ([17, 4], -0.5)
    assert step.row(1) == (None, -3.0)
    assert len(copies) == 1


def test_sets_larger_than_the_head_come_from_the_device() -> None:
    """Row 1 keeps the first 70 ids of its prefix, row 2 ids 1, 31 and 32; nobody reads row 3."""
    prefix = torch.arange(400).view(4, 100)
    wide = torch.zeros(4, 2, dtype=torch.int32)
    wide[2, 0], wide[2, 1] = 2 - 2**31, 1
    rows = packed_step(
        (1, 0.0, [5]),
        (70, -1.0, list(range(100, 164))),
        (3, -2.0, [steps.WIDE]),
        (99, -3.0, []),
        prefix=prefix,
        wide=wide,
    )
    step = steps.StepRows(rows, [True, True, True, False])
    assert step.row(0) == ([5], 0.0)
    assert step.row(1) == (list(range(100, 170)), -1.0)
    assert step.row(2) == ([1, 31, 32], -2.0)


def request(
    *, asks: bool = False, top_p: float = 1.0, top_k: int = 1 << 30, min_p: float = 0.0
) -> Any:
    params = SimpleNamespace(
        custom_params={"return_top_p_token_ids": True} if asks else None,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
    )
    return SimpleNamespace(sampling_params=params, customized_info=None)


def info_of(*requests: Any) -> Any:
    return hooks.flag_rows(
        lambda cls, batch, vocab_size: SimpleNamespace(num_rows=len(batch.reqs)),
        object,
        SimpleNamespace(reqs=list(requests)),
        100,
    )


def flags(info: Any) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    return info.rl_topp_flags.record, info.rl_topp_flags.filtered


def test_flags_follow_their_rows_through_filter_merge_and_copy() -> None:
    first = info_of(request(asks=True, top_p=0.9), request(), request(asks=True))
    assert flags(first) == ((True, False, True), (True, False, False))
    hooks.filter_flags(lambda *_: None, first, [2, 0], None)
    assert flags(first) == ((True, True), (False, True))
    hooks.merge_flags(lambda *_: None, first, info_of(request(top_k=5), request(min_p=0.1)))
    assert flags(first) == ((True, True, False, False), (False, True, True, True))
    copy = hooks.copy_flags(lambda info: SimpleNamespace(), first)
    assert flags(copy) == flags(first)


def test_rows_made_past_the_scheduler_s_batch_record_nothing() -> None:
    class Bare(SimpleNamespace):
        def __len__(self) -> int:
            return 2

    flagged = info_of(request(asks=True, top_p=0.9))
    hooks.merge_flags(lambda *_: None, flagged, Bare())
    assert flags(flagged) == ((True, False, False), (True, True, True))


def test_a_top_k_as_large_as_the_vocabulary_is_not_a_filter() -> None:
    assert flags(info_of(request(top_k=99), request(top_k=100)))[1] == (True, False)


@pytest.mark.parametrize("value", [1, "true", False, None])
def test_only_true_opts_in(value: object) -> None:
    one = request()
    one.sampling_params.custom_params = {"return_top_p_token_ids": value}
    assert not info_of(one).rl_topp_flags.any_record


def test_a_batch_in_which_nobody_asks_runs_the_stock_path_alone() -> None:
    info = info_of(request(top_p=0.9), request())
    calls: list[tuple[Any, ...]] = []

    def stock(*args: Any) -> str:
        calls.append(args)
        return "ids"

    logits_output = SimpleNamespace(next_token_logits=torch.zeros(2, 5))
    result = hooks.sample_and_record(stock, "sampler", logits_output, info, "more")
    assert result == "ids"
    assert calls == [("sampler", logits_output, info, "more")]
    result = hooks.sample_from_nucleus(stock, "sampler", "probs", info, "positions", False)
    assert result == "ids"
    assert calls[1] == ("sampler", "probs", info, "positions", False)
    assert vars(logits_output).keys() == {"next_token_logits"}
    assert vars(info).keys() == {"num_rows", "rl_topp_flags"}


def test_an_all_greedy_batch_records_the_sampled_ids() -> None:
    info = info_of(request(asks=True, top_k=1), request(top_k=1))
    logits_output = SimpleNamespace(next_token_logits=torch.zeros(2, 5))
    hooks.sample_and_record(lambda *_: torch.tensor([3, 1]), None, logits_output, info)
    assert logits_output.rl_topp_step.row(0) == ([3], 0.0)


def test_rows_without_flags_end_in_an_error_that_says_so() -> None:
    info = info_of(request(asks=True))
    with pytest.raises(RuntimeError, match="1 row flags for a batch of 3 rows"):
        hooks.sample_and_record(
            lambda *_: None, None, SimpleNamespace(next_token_logits=torch.zeros(3, 5)), info
        )


def test_only_the_requests_that_ask_collect() -> None:
    step = steps.StepRows(packed_step((1, 0.0, [3]), (1, 0.0, [4])), [True, False])
    output = SimpleNamespace(rl_topp_step=step)
    asking, other = request(asks=True), request()
    for row, one in enumerate((asking, other)):
        hooks.collect(lambda *_: None, None, row, one, output)
    hooks.collect(lambda *_: None, None, 0, asking, SimpleNamespace())
    assert asking.customized_info == {"rl_topp_kept_ids": [[3]], "rl_topp_kept_log_probs": [0.0]}
    assert other.customized_info is None


def sampling_info(*requests: Any) -> Any:
    info = info_of(*requests)
    params = [one.sampling_params for one in requests]
    info.top_ks = torch.tensor([one.top_k for one in params], dtype=torch.int32)
    info.top_ps = torch.tensor([one.top_p for one in params])
    info.min_ps = torch.tensor([one.min_p for one in params])
    info.need_min_p_sampling = any(one.min_p > 0 for one in params)
    info.sampling_seed = None
    return info


def test_a_mixed_batch_keeps_each_row_to_itself() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.1, 0.3], [0.2, 0.3, 0.5]])
    info = sampling_info(
        request(asks=True, top_p=0.55),
        request(asks=True),
        request(top_k=2),
        request(asks=True, top_k=1),
    )
    before = probs.clone()
    ids = hooks.sample_from_nucleus(None, None, probs, info, torch.arange(4), False)
    assert ids.dtype == torch.int32
    assert torch.equal(probs, before), "SGLang takes log-probs from them afterwards"
    step = steps.StepRows(info.rl_topp_step, info.rl_topp_flags.record)
    nucleus, log_prob = step.row(0)
    assert nucleus == [0, 1]
    assert log_prob == pytest.approx(np.log((0.5, 0.3)[ids[0]] / 0.8), abs=1e-6)
    assert step.row(1) == (None, pytest.approx(np.log((0.1, 0.2, 0.7)[ids[1]]), abs=1e-6))
    assert int(ids[2]) in (0, 2)
    assert step.row(3) == ([2], 0.0)


def test_a_batch_without_filters_is_sampled_by_sglang_itself() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    info = sampling_info(request(asks=True), request())
    ids = hooks.sample_from_nucleus(
        lambda *_: torch.tensor([1, 2], dtype=torch.int32), None, probs, info, None, True
    )
    assert ids.tolist() == [1, 2]
    assert steps.StepRows(info.rl_topp_step, info.rl_topp_flags.record).row(0) == (
        None,
        pytest.approx(np.log(0.3), abs=1e-6),
    )


def test_what_bypasses_the_sampler_is_refused_by_name() -> None:
    args = SimpleNamespace(
        speculative_algorithm="EAGLE",
        disaggregation_mode="prefill",
        pp_size=2,
        rl_on_policy_target=None,
        sampling_backend="pytorch",
    )
    asks = SimpleNamespace(sampling_params={"custom_params": {"return_top_p_token_ids": True}})
    manager = SimpleNamespace(server_args=args)
    with pytest.raises(
        ValueError,
        match=(
            r"speculative decoding \(EAGLE\), prefill-decode disaggregation, pipeline parallelism;"
        ),
    ):
        hooks.refuse_unsupported(lambda *_: "validated", manager, asks, [1])
    assert (
        hooks.refuse_unsupported(
            lambda *_: "validated", manager, SimpleNamespace(sampling_params={}), [1]
        )
        == "validated"
    )
    args.speculative_algorithm, args.disaggregation_mode, args.pp_size = None, "null", 1
    assert hooks.refuse_unsupported(lambda *_: "validated", manager, asks, [1]) == "validated"

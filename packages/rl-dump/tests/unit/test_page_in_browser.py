"""The page in a real browser: people can filter, sort, walk and read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from stubs import dump_browser
from stubs.dump_batches import (
    Columns,
    batch,
    placed,
    ragged,
    rollout_columns,
    write_tokenizer,
)
from stubs.dump_browser import browser
from stubs.dump_pages import awkward, page

from rl_dump import write_dump


@pytest.mark.usefixtures("needs_browser")
@pytest.mark.parametrize("width", [1400, 420])
def test_people_can_filter_sort_and_read(tmp_path: Path, width: int) -> None:
    columns, shards = placed(batch(200, seed=3))
    train = write_dump(
        tmp_path / "t.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns=columns,
        dp_shards=shards,
    )
    rollout = write_dump(
        tmp_path / "r.parquet",
        contract="rollout-dump.v1",
        batch_id=0,
        columns=rollout_columns(columns),
    )
    file = page(tmp_path, train, rollout, tokenizer=write_tokenizer(tmp_path))
    with browser(tmp_path, width=width) as web:
        web.open(file)
        assert web.run("return document.getElementById('count').textContent") == "200 samples"
        # Sort by tokens, longest first; the first row shown is the longest response.
        web.run(
            "[...document.querySelectorAll('#head button')].find((b) => b.title ==="
            " 'response_lengths').click()"
        )
        first = web.run("return Number(document.querySelector('.row').dataset.row)")
        assert columns["response_lengths"][first] == columns["response_lengths"].max()
        # Click it: prompt and response are shown as text, token by token.
        web.run(
            "document.querySelector('.row').click(); await new Promise((done) => setTimeout(done,"
            " 300))"
        )
        shown = web.run("return [...document.querySelectorAll('#detail .text')].at(-1).textContent")
        assert shown == rollout_columns(columns)["response"][first]
        colours = web.run(
            "return new Set([...document.querySelectorAll('#detail .text:last-child span')].map((s)"
            " => s.style.background)).size"
        )
        assert colours > 5
        # Colour by mask, then read one token's values.
        web.run(
            "[...document.querySelectorAll('.colours button')].find((b) => b.textContent === 'loss"
            " masks').click(); await new Promise((done) => setTimeout(done, 300))"
        )
        tip = web.run(
            "const span = document.querySelector('#detail .text:last-child"
            " span');span.dispatchEvent(new MouseEvent('mousemove', {bubbles: true, clientX: 50,"
            " clientY: 50})); return document.getElementById('tip').textContent"
        )
        assert "log probs" in tip
        # Filter by a condition and a word.
        expected = int(((columns["raw_reward"] > 0) & (columns["data_parallel_rank"] == 1)).sum())
        count = (
            "const f = document.getElementById('filter'); f.value = args[0]; f.dispatchEvent(new"
            " Event('input')); await new Promise((done) => setTimeout(done, 300)); return"
            " document.getElementById('count').textContent"
        )
        assert web.run(count, "raw_reward>0 rank=1") == f"{expected} of 200"
        assert web.run(count, "no_such_column>3") == "200 samples"
        assert web.run("return document.getElementById('filter').classList.contains('wrong')")
        # The layout leads back to the samples of a micro-batch.
        web.run("document.getElementById('tab-layout').click()")
        web.run(
            "document.querySelector('#view-layout button:not(.filler)').click(); await new"
            " Promise((done) => setTimeout(done, 300))"
        )
        assert web.run("return document.getElementById('count').textContent") == "3 of 200"
        assert web.run("return document.documentElement.scrollWidth <= innerWidth"), (
            "the page itself never scrolls sideways"
        )


@pytest.mark.usefixtures("needs_browser")
def test_thousands_of_samples_stay_responsive(tmp_path: Path) -> None:
    count = 4096
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, count)
    columns: Columns = {
        "rollout_position": np.arange(count),
        "response_lengths": lengths,
        "total_lengths": lengths + 1,
        "tokens": ragged([rng.integers(0, 9, length + 1) for length in lengths], np.int64),
        "log_probs": ragged([rng.normal(size=length) for length in lengths], np.float32),
        "rewards": rng.normal(size=count),
    }
    path = write_dump(tmp_path / "t.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    with browser(tmp_path) as web:
        web.open(page(tmp_path, path))
        assert web.run("return document.querySelectorAll('.row').length") < 80
        web.run(
            "document.getElementById('table').scrollTop = 4000 * 26; await new Promise((done) =>"
            " setTimeout(done, 200))"
        )
        assert web.run(
            "return [...document.querySelectorAll('.row')].some((line) => Number(line.dataset.row)"
            " > 3990)"
        )
        milliseconds = web.run(
            "const start = performance.now(); for (let i = 0; i < 5; i += 1) arrange(); return"
            " (performance.now() - start) / 5"
        )
        assert milliseconds < 1000


@pytest.mark.usefixtures("needs_browser")
def test_markup_in_a_response_is_shown_and_not_run(tmp_path: Path) -> None:
    columns = rollout_columns(batch(2))
    columns["response"] = [
        "</script><script>window.hacked = 1</script>",
        "<img src=x onerror='window.hacked = 1'>",
    ]
    path = write_dump(
        tmp_path / "r.parquet", contract="rollout-dump.v1", batch_id=0, columns=columns
    )
    with browser(tmp_path) as web:
        web.open(page(tmp_path, path), "#row=1")
        web.run("await new Promise((done) => setTimeout(done, 300))")
        assert web.run("return window.hacked === undefined")
        assert "<img src=x" in web.run("return document.getElementById('detail').textContent")


@pytest.mark.usefixtures("needs_browser")
def test_numbers_are_exact_or_marked_and_nan_sorts_last(tmp_path: Path) -> None:
    columns = awkward()
    path = write_dump(tmp_path / "t.parquet", contract="train-dump.v2", batch_id=0, columns=columns)
    head = (
        "[...document.querySelectorAll('#head button')].find((b) => b.title === 'rewards').click();"
        " return [table.descending, ...table.order]"
    )
    rewards = columns["rewards"]
    numbers = int(np.isfinite(rewards).sum())
    with browser(tmp_path) as web:
        web.open(page(tmp_path, path))
        for _ in range(2):
            descending, *order = web.run(head)
            shown = rewards[order]
            assert np.isfinite(shown[:numbers]).all(), "numbers first, whatever the direction"
            assert (np.diff(shown[:numbers]) * (-1 if descending else 1) >= 0).all()
        assert web.run("return show(dump.facts.sample_index[3])") == str(2**63 - 4)
        assert web.run(
            "return [table.order.length, dump.facts.row[7], dump.facts.row_field[7],"
            " dump.facts.mean_advantage_field[7]]"
        ) == [
            40,
            7,
            5,
            7,
        ]
        token = (
            "const s = await tokensOf(args[0]); return [show(s.ids.at(-1)), show(s.strips.huge[0]),"
            " show(s.strips.long[0]), show(s.strips.longest[0]), s.prompt]"
        )
        row = int(np.argmax(columns["response_lengths"]))
        _, huge, long, longest, prompt = web.run(token, row)
        assert (huge, long, longest) == ("≈ 1.000000e+300", f"{2**40 + 3:,}", "≈ 4.611686e+18")
        assert prompt == columns["total_lengths"][row] - columns["response_lengths"][row]
        assert web.run("const s = await tokensOf(0); return s.ids.at(-1)") == 2**40 + 1
        assert web.run("const s = await tokensOf(1); return show(s.ids.at(-1))") == "≈ 1.152922e+18"


FILTER = (
    "const f = document.getElementById('filter'); f.value = args[0]; f.dispatchEvent(new"
    " Event('input'));await new Promise((done) => setTimeout(done, 300)); return"
    " document.getElementById('count').textContent"
)
CHOOSE = "choose(args[0]); await new Promise((done) => setTimeout(done, 300));"
KEY = (
    "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: args[0], bubbles:"
    " true})); await new Promise((done) => setTimeout(done, 300));"
)


@pytest.fixture
def placed_page(tmp_path: Path) -> Path:
    columns, shards = placed(batch(60, seed=3))
    columns |= {"log_probs": columns["rollout_log_probs"], "constructor": np.arange(60)}
    train = write_dump(
        tmp_path / "t.parquet",
        contract="train-dump.v2",
        batch_id=0,
        columns=columns,
        dp_shards=shards,
    )
    return page(tmp_path, train)


@pytest.mark.usefixtures("needs_browser")
def test_filters_take_headings_spaces_and_quotes_and_say_what_is_wrong(
    tmp_path: Path, placed_page: Path
) -> None:
    with browser(tmp_path) as web:
        web.open(placed_page)
        rows = "return allRows.filter((row) => dump.facts.micro_batch[row] === 0).length"
        expected = f"{web.run(rows)} of 60"
        for text in (
            "micro-batch=0",
            "micro batch = 0",
            "micro_batch=0",
            "Micro-Batch  =  0",
            "micro-batch < 1",
            "step = 0 micro-batch=0",
        ):
            assert web.run(FILTER, text) == expected, text
        assert web.run(FILTER, "mean gap > 0") == "0 of 60"
        assert web.run(FILTER, "mean gap >= 0") != "0 of 60"
        assert web.run(FILTER, "constructor < 3") == "3 of 60"
        assert web.run(FILTER, 'finish = "stop"') == web.run(FILTER, "finish_reason=stop")
        assert web.run(FILTER, "finish = nothing") == "0 of 60"
        assert web.run(FILTER, "toString") == "0 of 60"
        assert web.run(FILTER, "nosuch > 3") == "60 samples"
        problem = web.run(
            "const p = document.getElementById('problem'); return p.hidden ? '' : p.innerText"
        )
        assert problem.startswith("No column “nosuch”. Columns: row, position, ")
        assert web.run(FILTER, "") == "60 samples"
        assert web.run("return document.getElementById('problem').hidden")


@pytest.mark.usefixtures("needs_browser")
def test_tokens_are_walked_by_keys_and_their_values_pinned(
    tmp_path: Path, placed_page: Path
) -> None:
    hidden = "return document.getElementById('tip').hidden"
    with browser(tmp_path) as web:
        web.open(placed_page)
        heads = web.run(
            "return [...document.querySelectorAll('#head button')].map((button) => button.title)"
        )
        assert heads[:6] == [
            "rollout_position",
            "group_ids",
            "rollout_ids",
            "step",
            "data_parallel_rank",
            "micro_batch",
        ]
        web.run(CHOOSE, 5)
        assert re.fullmatch(
            r"Row 5 · position 5 · group \d+",
            web.run("return document.querySelector('#detail h2').textContent"),
        )
        assert web.run("return document.querySelector('.legend').textContent") == "all below 1e-4"
        assert (
            web.run("return document.querySelectorAll('[data-token][tabindex=\"0\"]').length") == 1
        )
        web.run("document.querySelector('[data-token]').focus()")
        web.run(KEY, "ArrowRight")
        assert web.run("return document.activeElement.dataset.token") == "1"
        assert not web.run(hidden)
        web.run(KEY, "Enter")
        move = (
            "document.querySelector('[data-token=\"0\"]').dispatchEvent(new MouseEvent('mousemove',"
            " {bubbles: true}));"
        )
        assert (
            web.run(move + "return document.querySelector('#tip td:nth-child(2)').textContent")
            == "1"
        ), "pinned"
        web.run(KEY, "Escape")
        assert web.run(hidden)
        web.run("document.querySelector('[data-token=\"0\"]').click()")
        assert not web.run(hidden)
        web.run(KEY, "j")
        assert web.run("return document.querySelector('#detail h2').textContent").startswith(
            "Row 6 "
        )
        assert web.run(hidden), "the values of another sample's token never stay"
        web.run(
            "document.querySelector('[data-token]').click();"
            " document.getElementById('tab-layout').click()"
        )
        assert web.run(hidden)
        assert re.search(
            r"[\d,]+ tokens per rank, the fullest has \d\.\d\d times that",
            web.run("return document.getElementById('view-layout').textContent"),
        )


@pytest.mark.usefixtures("needs_browser")
@pytest.mark.parametrize(("width", "unfolded"), [(1400, True), (600, False)])
def test_the_values_of_a_sample_are_folded_where_there_is_no_room(
    tmp_path: Path, placed_page: Path, width: int, unfolded: bool
) -> None:
    with browser(tmp_path, width=width) as web:
        web.open(placed_page)
        web.run(CHOOSE, 5)
        assert web.run("return document.querySelector('#detail details').open") is unfolded


@pytest.mark.parametrize(
    ("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)]
)
def test_without_a_browser_ci_fails_and_others_are_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(dump_browser, "PYTHON", sys.version_info[:2])
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "/nowhere")
    # Both are caught: a skip that gets out would skip this test instead of failing it.
    with pytest.raises(
        (pytest.fail.Exception, pytest.skip.Exception),
        match="no chromium and no chromedriver; `apt-get install",
    ) as end:
        dump_browser.require()
    assert end.type is outcome


def test_on_another_python_the_rule_is_told_and_no_browser_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dump_browser, "PYTHON", (3, 9))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match=r"on Python 3\.9 only") as end:
        dump_browser.require()
    # By this word `nox` tells in CI that a browser is missing.
    assert "chromium" not in str(end.value)

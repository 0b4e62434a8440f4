"""Data sources: splits that share no word, streams that do not repeat each other."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from rl_runtime.config.rollout import DataSection
from rl_runtime.errors import ConfigError
from rl_runtime.rollout.data.entries import split_of
from rl_runtime.rollout.data.source import DataSource, make_data_source


class CharacterTokenizer:
    eos_token_id: int | None = 1

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt and not tokenize
        return conversation[0]["content"] + " ->"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        raise NotImplementedError


def words(source: DataSource, count: int = 300) -> list[str]:
    return [prompt.metadata["metadata"]["word"].casefold() for prompt in source.next_prompts(count)]


def held_out(source: DataSource, split: Literal["check", "eval"], count: int = 100) -> set[str]:
    return {
        prompt.metadata["metadata"]["word"].casefold() for prompt in source.held_out(split, count)
    }


@pytest.fixture(scope="module")
def section() -> DataSection:
    pytest.importorskip("reasoning_gym")
    return DataSection(prompt_template="{word}", options={"min_word_len": 3, "max_word_len": 6})


def test_no_word_of_one_split_is_in_another(section: DataSection) -> None:
    source = make_data_source(section, CharacterTokenizer(), rng=0)
    train, check, evaluation = (
        set(words(source)),
        held_out(source, "check"),
        held_out(source, "eval"),
    )
    assert not train & check
    assert not train & evaluation
    assert not check & evaluation


def test_held_out_prompts_are_the_same_at_each_call(section: DataSection) -> None:
    source = make_data_source(section, CharacterTokenizer(), rng=0)
    source.next_prompts(5)
    assert [prompt.text for prompt in source.held_out("eval", 20)] == [
        prompt.text for prompt in source.held_out("eval", 20)
    ]


def test_random_starts_draw_other_prompts_and_the_same_start_the_same(section: DataSection) -> None:
    first, again, other = (
        words(make_data_source(section, CharacterTokenizer(), rng=rng), 50) for rng in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_the_warm_start_draws_other_entries_than_the_batches(section: DataSection) -> None:
    source = make_data_source(section, CharacterTokenizer(), rng=0)
    warm = [prompt.text for prompt in source.next_sft_prompts(50)]
    assert warm != [prompt.text for prompt in source.next_prompts(50)]


def test_a_prompt_is_rendered_by_the_chat_template_and_tokenised(section: DataSection) -> None:
    prompt = make_data_source(section, CharacterTokenizer(), rng=0).next_prompts(1)[0]
    word = prompt.metadata["metadata"]["word"]
    assert prompt.text == f"{word} ->"
    assert prompt.tokens.tolist() == [ord(character) for character in prompt.text]
    assert prompt.label == word[::-1]


def test_split_shares_follow_the_fraction() -> None:
    splits = [split_of(str(number), 0.2) for number in range(4000)]
    assert abs(splits.count("train") / 4000 - 0.8) < 0.03
    assert abs(splits.count("eval") / 4000 - 0.1) < 0.02


@pytest.mark.parametrize(
    ("changes", "mentions"),
    [
        ({"task": "no_such_task"}, "no_such_task"),
        ({"options": {"no_option": 1}}, "no_option"),
        ({"prompt_template": "{missing}"}, "missing"),
        ({"split_key": "missing"}, "data.split_key"),
    ],
)
def test_a_wrong_section_names_the_key(
    section: DataSection, changes: dict[str, Any], mentions: str
) -> None:
    with pytest.raises(ConfigError, match=mentions):
        make_data_source(
            section.model_copy(update=changes), CharacterTokenizer(), rng=0
        ).next_prompts(1)


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"q{n}", "label": str(n)}) + "\n" for n in range(40))
    )
    section = DataSection(
        kind="jsonl", path=str(path), split_key="", chat_template=False, held_out_fraction=0.5
    )
    source = make_data_source(section, CharacterTokenizer(), rng=0)
    prompts = source.next_prompts(80)
    assert prompts[0].label == prompts[0].text.removeprefix("q")
    assert {prompt.text for prompt in prompts}.isdisjoint(
        prompt.text for prompt in source.held_out("eval", 20)
    )


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n[1]\n')
    with pytest.raises(ConfigError, match="line 2"):
        make_data_source(
            DataSection(kind="jsonl", path=str(path), split_key=""), CharacterTokenizer(), rng=0
        )

"""Recipes: every problem is one line that names the key."""

from pathlib import Path

import pytest

from rl_runtime.config import Recipe, load_recipe, recipe_to_toml
from rl_runtime.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_an_empty_recipe_is_the_default(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "")) == Recipe()


def test_a_resolved_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(
            tmp_path, '[data]\noptions = { min_word_len = 3 }\n[rollout]\nstop = ["\\n", "\\"x"]\n'
        )
    )
    assert load_recipe(write(tmp_path, recipe_to_toml(recipe))) == recipe


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[optimizer]\nlr = 1e-4\n")
    assert load_recipe(path, ["optimizer.lr=2e-4", "run.dir=some/where"]).optimizer.lr == 2e-4


@pytest.mark.parametrize(
    ("text", "overrides", "mentions"),
    [
        ("[optimizer]\nlearning_rate = 1\n", [], ["unknown key optimizer.learning_rate"]),
        ("[optimizer]\nbeta_1 = 0.5\n", [], ["optimizer.beta_1", "did you mean optimizer.beta1?"]),
        ("[rolout]\ntop_p = 0.5\n", [], ["rolout", "did you mean rollout"]),
        (
            "[rollout]\ntop_p = 1.5\ntop_k = 'x'\n",
            [],
            ["rollout.top_p", "1.5", "rollout.top_k", "'x'"],
        ),
        ("", ["optimizer.lr=inf"], ["--set optimizer.lr=inf: optimizer.lr", "finite"]),
        ("[rollout]\nstop = 'x'\n", ["rollout.top_p=0.5"], [".toml: rollout.stop"]),
        ("", ["rollout.temperature=nan"], ["rollout.temperature", "nan"]),
        ("[rollout]\nstop = 'x'\n", [], ["rollout.stop", "'x'"]),
        ("[run]\nrng = -1\n", [], ["run.rng", "-1"]),
        ("[train]\nglobal_batch_size = 10000\n", [], ["global_batch_size = 10000", "512"]),
        ("[algorithm]\nold_log_probs = 'reuse'\n", [], ["one step per batch"]),
        (
            "[algorithm]\nkl_coef = 0.1\nkl_log_probs = 'full'\n",
            [],
            ["kl_log_probs = 'full' needs algorithm.full_scores = true"],
        ),
        (
            "[algorithm]\nkl_log_probs = 'kept_set'\n",
            [],
            ["kl_log_probs = 'kept_set' is set", "kl_coef = 0"],
        ),
        ("[debug]\nrollout_only = true\nload_rollout_dump = 'x'\n", [], ["exclude each other"]),
        ("not toml", [], ["not valid TOML"]),
        ("", ["lr=3"], ["override 'lr=3'", "section.key=value"]),
        ("", ["optimizer.lr"], ["section.key=value"]),
        ("run = 3\n", ["run.rng=3"], ["is a value, not a table"]),
    ],
)
def test_a_wrong_recipe_names_the_key(
    tmp_path: Path, text: str, overrides: list[str], mentions: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text), overrides)
    assert all(mention in str(caught.value) for mention in mentions), caught.value
    assert len(str(caught.value).splitlines()) == text.count("top_") or "top_" not in text


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_recipe(tmp_path / "none.toml")


def test_the_quick_start_recipe_is_valid() -> None:
    recipe = load_recipe(Path(__file__).parents[4] / "recipes" / "quickstart.toml")
    assert recipe.rollout.top_p == 0.9
    assert recipe.parallel.world_size == 2


def test_every_field_of_every_section_is_documented() -> None:
    for name, section in Recipe.model_fields.items():
        fields = getattr(section.annotation, "model_fields", {})
        undocumented = [field for field, info in fields.items() if not info.description]
        assert not undocumented, f"[{name}]: {undocumented}"

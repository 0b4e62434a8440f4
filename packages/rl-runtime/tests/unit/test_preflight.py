"""What is wrong before the start is one clear line each, and nothing is started."""

import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rl_runtime.config import Recipe
from rl_runtime.config.library_options import unknown_names
from rl_runtime.config.training import ModelSection
from rl_runtime.errors import ConfigError
from rl_runtime.setup import preflight
from rl_runtime.setup.preflight import check_before_start
from rl_runtime.setup.tiny_model import write_tiny_model

_INSTALLED = {"megatron-core", "sglang"} <= {
    distribution.name for distribution in metadata.distributions()
}


def problems(tmp_path: Path, **sections: dict[str, Any]) -> list[str]:
    sections.setdefault("run", {"dir": str(tmp_path / "run")})
    with pytest.raises(ConfigError) as caught:
        check_before_start(Recipe.model_validate(sections))
    return str(caught.value).splitlines()


def test_a_good_recipe_passes(tmp_path: Path) -> None:
    check_before_start(Recipe.model_validate({"run": {"dir": str(tmp_path / "run")}}))


def test_an_existing_run_folder_is_refused(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, run={"dir": str(tmp_path)})
    assert "run.dir" in line
    assert "exists already" in line


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (line,) = problems(tmp_path, engine={"port": port})
    assert f"engine.port = {port}" in line


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, model={"path": "/no/such/model"})
    assert "model.path = /no/such/model: no such folder" in line


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    lines = problems(
        tmp_path,
        model={"path": str(tmp_path)},
        rollout={"generate": "no_such_module:f"},
        reward={"function": "nonsense"},
        data={"task": "no_such_task"},
        dump={"rollout": "all.parquet", "train": ""},
    )
    mentions = [
        "config.json",
        "safetensors",
        "tokenizer",
        "no_such_module",
        "module:function",
        "no_such_task",
        "{batch_id}",
    ]
    for line, mention in zip(lines, mentions, strict=True):
        assert mention in line


def test_training_from_a_dump_needs_the_policy_it_was_sampled_from(tmp_path: Path) -> None:
    lines = problems(tmp_path, debug={"load_rollout_dump": str(tmp_path / "none.parquet")})
    assert "needs model.path" in lines[0]
    assert "no such file" in lines[1]


def test_training_from_several_dumps_needs_all_of_them(tmp_path: Path) -> None:
    for batch_id in (0, 2):
        (tmp_path / f"rollout_{batch_id}.parquet").touch()
    template = str(tmp_path / "rollout_{batch_id}.parquet")
    (line,) = problems(
        tmp_path,
        model={"path": good_model(tmp_path)},
        debug={"load_rollout_dump": template},
        train={"num_batches": 4},
    )
    assert "rollout_1.parquet" in line
    assert "1 other batches" in line


@pytest.mark.parametrize(
    ("sections", "mentions"),
    [
        (
            {"parallel": {"tensor": 4}},
            ["parallel.tensor = 4 does not divide num_attention_heads = 6"],
        ),
        (
            {"parallel": {"pipeline": 3}},
            ["parallel.pipeline = 3 does not divide num_hidden_layers = 4"],
        ),
        ({"megatron": {"sequence_parallel": True}}, ["parallel.tensor > 1"]),
        (
            {"rollout": {"max_response_tokens": 512}},
            ["rollout.max_response_tokens = 512", "512 positions"],
        ),
        ({"engine": {"port": 65000}}, ["engine.port = 65000", "too high"]),
        ({"engine": {"host": "no.such.host.invalid", "port": 20500}}, ["no.such.host.invalid"]),
        (
            {"cluster": {"address": "127.0.0.1:9"}},
            ["cluster.address = 127.0.0.1:9", "nothing answers"],
        ),
        (
            {"cluster": {"address": "ray://127.0.0.1:9"}},
            ["cluster.address = ray://127.0.0.1:9", "nothing answers"],
        ),
        ({"cluster": {"address": "local"}}, ["cluster.address = local", "host:port"]),
        (
            {"engine": {"url": "http://127.0.0.1:9"}},
            ["engine.url = http://127.0.0.1:9", "no SGLang server"],
        ),
        ({"engine": {"url": "nonsense"}}, ["engine.url = nonsense"]),
        ({"data": {"options": {"min_word_len": 9, "max_word_len": 2}}}, ["data.options"]),
        ({"data": {"options": {"no_such_option": 1}}}, ["data.options", "no_such_option"]),
        ({"data": {"prompt_template": "{wrod}"}}, ["data.prompt_template", "'wrod'", "'word'"]),
        ({"data": {"split_key": "wrod"}}, ["data.split_key = 'wrod'"]),
        (
            {
                "data": {"kind": "jsonl", "path": "/no/such/file"},
                "reward": {"function": "rl_runtime.rollout.reward:label_reward"},
            },
            ["data.path"],
        ),
        ({"reward": {"function": "asyncio:sleep"}}, ["reward.function", "async"]),
        (
            {"run": {"dir": "/dev/null/run"}},
            ["run.dir = /dev/null/run", "/dev/null is not a folder"],
        ),
        (
            {"dump": {"train": "/dev/null/{batch_id}.parquet"}},
            ["dump.train", "/dev/null is not a folder"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_named_by_its_key(
    tmp_path: Path, sections: dict[str, dict[str, Any]], mentions: list[str]
) -> None:
    line = problems(tmp_path, **sections)[0]
    assert all(mention in line for mention in mentions), line


def test_what_needs_a_gpu_is_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_DEVICES", tmp_path)
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": "bfloat16"},
        "engine": {"gpus_per_engine": 1},
    }
    lines = problems(tmp_path, **sections)
    assert "model.dtype = bfloat16" in lines[0]
    assert "engine.gpus_per_engine = 1" in lines[1]
    (tmp_path / "nvidia0").touch()
    check_before_start(Recipe.model_validate({"run": {"dir": str(tmp_path / "run")}, **sections}))


def test_a_hook_whose_module_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_hook.py").write_text("raise RuntimeError('no license file')")
    (tmp_path / "misspelt_hook.py").write_text("def generate(:")
    monkeypatch.syspath_prepend(tmp_path)
    lines = problems(
        tmp_path, rollout={"generate": "broken_hook:f"}, reward={"function": "misspelt_hook:f"}
    )
    assert "RuntimeError: no license file" in lines[0]
    assert "SyntaxError" in lines[1]


def test_prompts_from_a_file_need_a_reward_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(f'{{"prompt": "{number}", "label": "{number}"}}\n' for number in range(50))
    )
    data = {"kind": "jsonl", "path": str(path), "split_key": ""}
    (line,) = problems(tmp_path, data=data)
    assert "reward.function" in line
    check_before_start(
        Recipe.model_validate(
            {
                "run": {"dir": str(tmp_path / "run")},
                "data": data,
                "reward": {"function": "rl_runtime.rollout.reward:label_reward"},
            }
        )
    )


def good_model(tmp_path: Path) -> str:
    write_tiny_model(tmp_path / "model", ModelSection(), rng=0)
    return str(tmp_path / "model")


def test_a_good_model_folder_passes(tmp_path: Path) -> None:
    check_before_start(
        Recipe.model_validate(
            {"run": {"dir": str(tmp_path / "run")}, "model": {"path": good_model(tmp_path)}}
        )
    )


@pytest.mark.parametrize(
    ("name", "content", "mention"),
    [
        ("config.json", b"{", "config.json cannot be read"),
        ("config.json", b'{"model_type": "gpt2"}', "model_type is 'gpt2'"),
        ("config.json", b"[1]", "not an object"),
        ("model.safetensors", b"", "is cut short"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}", "no readable header"),
        ("model.safetensors", None, "expected"),
        ("tokenizer.json", b"", "has no tokenizer"),
    ],
)
def test_a_broken_model_folder_is_named(
    tmp_path: Path, name: str, content: bytes | None, mention: str
) -> None:
    path = Path(good_model(tmp_path)) / name
    if name == "tokenizer.json":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    (line,) = problems(tmp_path, model={"path": str(path.parent)})
    assert str(path.parent) in line
    assert mention in line


def test_a_reference_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, model={"reference_path": good_model(tmp_path)})
    assert "algorithm.kl_coef = 0" in line


def test_braces_in_the_name_of_the_run_folder_are_no_placeholders(tmp_path: Path) -> None:
    check_before_start(Recipe.model_validate({"run": {"dir": str(tmp_path / "run{x}")}}))


@pytest.mark.skipif(not _INSTALLED, reason="Megatron-Core or SGLang is not installed")
def test_names_that_are_passed_through_are_those_of_the_installed_libraries(tmp_path: Path) -> None:
    given = {"page_size": 16, "tensor_parallel_size": 1, "disable_radix_cach": True}
    lines = problems(
        tmp_path,
        megatron={
            "layernorm_epsilon": 1e-6,
            "hidden_dropuot": 0.1,
            "tensor_model_parallel_size": 2,
        },
        sglang=given,
    )
    assert lines == [
        (
            "megatron.hidden_dropuot: is not a field of Megatron-Core's TransformerConfig; did you"
            " mean hidden_dropout?"
        ),
        (
            "sglang.disable_radix_cach: is not an argument of SGLang's server; did you mean"
            " disable_radix_cache?"
        ),
    ]


def test_of_a_library_that_is_not_installed_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert list(unknown_names(megatron={"x": 1}, sglang={"y": 2})) == []

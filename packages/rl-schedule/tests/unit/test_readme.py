"""The code blocks of the README run, and adoption is short."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rl_schedule as rs

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
PLAIN = BLOCKS[0]
NETWORK, VERL, SLIME, PREFIXES = (
    next(block for block in BLOCKS if word in block)
    for word in ("from_hf_config", "attention_mask", "split_train_data_by_dp", "PrefixRequest")
)


def run(block: str, **names: Any) -> dict[str, Any]:
    """Run a block where these names are the reader's own."""
    exec(compile(block, str(README), "exec"), names)
    return names


@pytest.mark.parametrize("block", [PLAIN, VERL, SLIME])
def test_adoption_takes_fewer_than_fifteen_lines(block: str) -> None:
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) < 15
    assert all(len(line) <= 100 for line in lines)


def test_a_plain_loop_trains_every_sample_once_in_equally_many_micro_batches() -> None:
    samples = [[0] * int(n) for n in np.random.default_rng(0).integers(1, 4000, 256)]
    calls: list[list[str]] = []
    trained: list[int] = []

    def loss_of(batch: list[list[int]]) -> Any:
        assert sum(map(len, batch)) <= 4096
        trained.extend(map(id, batch))
        return SimpleNamespace(backward=lambda: calls[-1].append("backward"))

    for rank in range(2):
        calls.append([])
        optimizer = SimpleNamespace(
            step=lambda: calls[-1].append("step"), zero_grad=lambda: calls[-1].append("zero")
        )
        run(
            PLAIN,
            samples=samples,
            rollout_ids=[f"rollout {i // 2}" for i in range(256)],
            world_size=2,
            rank=rank,
            loss_of=loss_of,
            optimizer=optimizer,
        )
    assert calls[0] == calls[1]
    assert calls[0].count("step") == 2
    assert sorted(trained) == sorted(map(id, samples))


def test_the_example_with_a_network_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    run(NETWORK)
    assert re.match(r"\([\d, ]+\) 1\.\d+ 1\.\d+ [0-9a-f]{12}\n", capsys.readouterr().out)


class Tensor:
    """As much of a tensor as verl uses of an order; this package is tested without torch."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)

    def detach(self) -> "Tensor":
        return self

    def numpy(self) -> Any:
        return self.values


class Batch:
    """As much of a batch of verl's as its loop uses."""

    def __init__(self, rows: Any, uid: Any) -> None:
        self.batch = {"attention_mask": rows}
        self.non_tensor_batch = {"uid": uid}

    def __len__(self) -> int:
        return len(self.batch["attention_mask"])

    def reorder(self, order: Any) -> None:
        whole = self.select_idxs(order.detach().numpy())
        self.batch, self.non_tensor_batch = whole.batch, whole.non_tensor_batch

    def select_idxs(self, order: Any) -> "Batch":
        return Batch(self.batch["attention_mask"][order], self.non_tensor_batch["uid"][order])

    def chunk(self, count: int) -> list["Batch"]:
        return [self.select_idxs(part) for part in np.split(np.arange(len(self)), count)]


def test_a_loop_like_verls_gets_its_outputs_in_the_order_of_the_batch() -> None:
    lengths = np.random.default_rng(1).integers(1, 512, 48)
    masks = (np.arange(512) < lengths[:, None]).astype(np.int64)

    def forward(micro_batch: Batch) -> list[int]:
        own = micro_batch.batch["attention_mask"].sum(-1)
        assert own.sum() <= 1024
        found: list[int] = own.tolist()
        return found

    names = run(
        VERL,
        torch=SimpleNamespace(tensor=Tensor),
        batch=Batch(masks, np.array([f"prompt {i // 4}" for i in range(48)], dtype=object)),
        ppo_mini_batch_size=4,
        world_size=4,
        ppo_max_token_len_per_gpu=1024,
        forward=forward,
        outputs=[],
    )
    assert [part.size for part in names["plan"].partitions] == [12] * 4
    assert names["plan"].global_batch_sizes == (4, 4, 4)
    assert names["log_probs"] == lengths.tolist()


def test_a_loop_like_slimes_gets_what_each_rank_trains() -> None:
    lengths = np.random.default_rng(2).integers(1, 900, 64).tolist()
    data = {"total_lengths": lengths, "rollout_ids": [i // 4 for i in range(64)]}
    args = SimpleNamespace(global_batch_size=8, context_parallel_size=2, max_tokens_per_gpu=1024)

    def take(columns: dict[str, list[int]], positions: Any) -> dict[str, list[int]]:
        return {key: [column[i] for i in positions] for key, column in columns.items()}

    split = run(SLIME, take=take)["split_train_data_by_dp"]
    ranks = split(args, data, 4)
    assert sorted(int(i) for rank in ranks for i in rank["partition"]) == list(range(64))
    for rank in ranks:
        assert rank["global_batch_sizes"] == (8, 8)
        assert rank["num_microbatches"] == ranks[0]["num_microbatches"]
        assert rank["total_lengths"] == [lengths[i] for i in rank["partition"]]
        for indices in rank["micro_batch_indices"]:
            assert sum(rank["total_lengths"][i] for i in indices) <= 2048


def test_the_example_with_shared_prefixes_runs_what_a_rank_trains() -> None:
    ran: list[int] = []
    for rank in range(2):
        names: dict[str, Any] = {
            "total_lengths": [100 + i % 7 for i in range(256)],
            "rollout_ids": range(256),
            "group_ids": [f"group {i // 8}" for i in range(256)],
            "prompt_lengths": [60] * 256,
        }
        found = run(PREFIXES, **names, world_size=2, rank=rank)
        plan = found["plan"]
        assert len(plan.num_microbatches) == 4
        assert found["k"] == plan.micro_batches_per_rank - 1
        for k in range(plan.micro_batches_per_rank):
            ran += plan.micro_batch(rank, k).samples.tolist()
    assert sorted(ran) == list(range(256))


@pytest.mark.parametrize(
    "setting",
    [
        {"micro_batch_size": 2, "max_tokens_per_gpu": None},
        {"balance": "none"},
        {"rank_slack": 0.1},
        {"pad_to_multiple": 8},
        {"sample_costs": [1.0]},
        {"keep_together": [0]},
        {"max_samples_per_micro_batch": 2},
        {"equal_samples": True},
        {"pad_to_longest": True},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_the_readme_says_is_refused_with_prefixes_is(setting: dict[str, Any]) -> None:
    name = next(iter(setting))
    section = README.read_text(encoding="utf-8").split("## Shared prefixes")[1]
    assert f"`{name}" in section.split("Refused here")[1].split("\n\n")[0]
    good: dict[str, Any] = {"total_lengths": [5], "rollout_ids": [0], "global_batch_size": 1}
    schedule = rs.ScheduleRequest(**{**good, "dp_size": 1, "max_tokens_per_gpu": 16, **setting})
    with pytest.raises(rs.ScheduleError, match=name):
        rs.PrefixRequest(schedule=schedule, prefix_ids=[0], prefix_lengths=[2])


def test_the_table_of_promises_is_that_of_the_checker() -> None:
    rows = re.findall(r"^\| (P\d+) \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [f"P{number}" for number in range(1, 14)]
    assert "`P1` to `P13`" in str(Path(rs.invariants.__file__).read_text(encoding="utf-8"))

"""Placement, start and refusal of the actors, with a stand-in for Ray (`nox -s stubs`)."""

from collections.abc import Callable
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
if Path(ray.__file__).parents[1].name != "stubs":
    pytest.skip(
        "needs the stand-ins of tests/stubs on the path: nox -s stubs", allow_module_level=True
    )

import time  # noqa: E402

from rl_runtime.cluster.placement import required_cpus, reserve  # noqa: E402
from rl_runtime.cluster.waiting import Waiter  # noqa: E402
from rl_runtime.config import Recipe  # noqa: E402
from rl_runtime.errors import DeadlineError, RuntimeSetupError  # noqa: E402


@pytest.fixture
def resources(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def there_are(**amounts: float) -> None:
        monkeypatch.setattr(ray, "RESOURCES", amounts)

    return there_are


def _recipe(**parallel: int) -> Recipe:
    return Recipe.model_validate({"parallel": parallel, "engine": {"count": 2}})


def test_every_actor_has_a_bundle_of_its_own(resources: Callable[..., None]) -> None:
    recipe = _recipe(data=2)
    resources(CPU=100.0)
    placement = reserve(recipe)
    options = [placement.rollout, *placement.engines, *placement.trainers]
    assert [item["scheduling_strategy"].placement_group_bundle_index for item in options] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert len(placement.group.bundle_specs) == 5
    assert (len(placement.engines), len(placement.trainers)) == (2, 2)
    assert sum(item["num_cpus"] for item in options) == pytest.approx(required_cpus(recipe))
    placement.release()
    assert placement.group.removed


def test_no_room_names_what_was_asked_for_and_what_is_there(resources: Callable[..., None]) -> None:
    resources(CPU=0.5)
    with pytest.raises(RuntimeSetupError, match=r"2 engines.*asked for.*free are \{'CPU': 0\.5"):
        reserve(_recipe(data=2))


def test_the_first_failure_ends_a_wait_and_keeps_its_type() -> None:
    waiter = Waiter(run_deadline=time.monotonic() + 5)
    with pytest.raises(ZeroDivisionError):
        waiter.all(
            [ray.ObjectRef(error=ZeroDivisionError("rank 1"))], "training", timeout_seconds=1
        )
    assert waiter.all([ray.ObjectRef(3), ray.ObjectRef(4)], "training", timeout_seconds=1) == [3, 4]


def test_a_wait_ends_at_its_deadline() -> None:
    waiter = Waiter(run_deadline=time.monotonic() + 5)
    with pytest.raises(DeadlineError, match="training"):
        waiter.all([ray.ObjectRef(ready=False)], "training", timeout_seconds=0.01)


def test_a_rank_with_other_contracts_is_refused_before_anything_starts(
    resources: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rl_runtime.cluster import actor_group, trainer_actor
    from rl_runtime.contract_table import installed_contracts

    info = tmp_path / "rl_dump-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-dump\nVersion: 9.0\n")
    (info / "entry_points.txt").write_text("[rl.contracts.writes]\ntrain-dump.v3 = nowhere\n")
    monkeypatch.setattr(
        trainer_actor.TrainerActor, "contracts", lambda _: installed_contracts([str(tmp_path)])
    )
    monkeypatch.setattr("rl_runtime.cluster.actor.log_to_file", lambda _path: None)
    started: list[str] = []
    monkeypatch.setattr(trainer_actor.TrainerActor, "start", lambda *_: started.append("trainer"))
    resources(CPU=100.0)
    recipe = Recipe.model_validate(
        {"run": {"dir": str(tmp_path / "run")}, "engine": {"url": "http://127.0.0.1:1"}}
    )
    waiter = Waiter(run_deadline=time.monotonic() + 30)
    actors = actor_group.ActorGroup(recipe, reserve(recipe), waiter)
    with pytest.raises(
        RuntimeSetupError, match=r"trainer rank 0 writes train-dump\.v3 \(rl-dump\).*rl-dump 9\.0"
    ):
        actors.start(tmp_path)
    assert started == []
    actors.close()
    assert len(ray.KILLED) >= 2

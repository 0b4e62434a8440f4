"""Every stand-in in `tests/stubs` has the signature of what it stands for.

That is read from the real library's source, where it is installed.
"""

import ast
import importlib.machinery
import sys
from pathlib import Path

import pytest

STUBS = Path(__file__).parents[2] / "stubs"
DEFINED_IN: dict[str, dict[str, str | None]] = {
    "ray/__init__.py": {
        "get": "ray/_private/worker.py",
        "put": "ray/_private/worker.py",
        "wait": "ray/_private/worker.py",
        "kill": "ray/_private/worker.py",
        "init": "ray/_private/worker.py",
        "shutdown": "ray/_private/worker.py",
        "remote": "ray/_private/worker.py",
        "cluster_resources": "ray/_private/state.py",
        "available_resources": "ray/_private/state.py",
    },
    "ray/exceptions.py": {"RayError": None, "RayTaskError": None},
    "ray/util/__init__.py": {"get_node_ip_address": "ray/_private/services.py"},
    "ray/util/placement_group.py": {
        "PlacementGroup.wait": None,
        "placement_group": None,
        "remove_placement_group": None,
    },
    "ray/util/scheduling_strategies.py": {"PlacementGroupSchedulingStrategy.__init__": None},
    "ray/_private/worker.py": {"print_worker_logs": None},
    "sglang/srt/plugins/__init__.py": {"load_plugins": None},
    "sglang/srt/plugins/hook_registry.py": {
        "HookRegistry.register": None,
        "HookRegistry.apply_hooks": None,
        "HookType": None,
    },
    "sglang/srt/entrypoints/http_server.py": {"launch_server": None},
    "sglang/srt/server_args.py": {"prepare_server_args": None},
    "sglang/srt/utils.py": {"kill_process_tree": "sglang/srt/utils/common.py"},
    "megatron/core/parallel_state.py": {
        "get_tensor_model_parallel_rank": None,
        "get_context_parallel_rank": None,
        "get_data_parallel_rank": None,
        "get_pipeline_model_parallel_rank": None,
        "destroy_model_parallel": None,
    },
}
"""Per file of the stand-ins: each name, and the real one's file where that is another."""
CASES = [
    (stub, name, real or stub) for stub, names in DEFINED_IN.items() for name, real in names.items()
]


def _site(library: str) -> Path:
    """Where the real library is, past the stand-ins that may be on the path."""
    path = [folder for folder in sys.path if Path(folder or ".").name != "stubs"]
    spec = importlib.machinery.PathFinder.find_spec(library, path)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{library} is not installed")
    return Path(next(iter(spec.submodule_search_locations))).parent


def _definition(path: Path, name: str) -> ast.FunctionDef | ast.ClassDef:
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        nodes = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        ]
        assert nodes, f"{path} defines no {name}"
        node = nodes[-1]  # overloads come first
        body = node.body
    return node


@pytest.mark.parametrize(
    ("stub", "name", "real"), CASES, ids=[f"{stub}:{name}" for stub, name, _ in CASES]
)
def test_a_stand_in_takes_what_the_real_one_takes(stub: str, name: str, real: str) -> None:
    there = _definition(_site(stub.partition("/")[0]) / real, name)
    here = _definition(STUBS / stub, name)
    assert type(here) is type(there)
    if isinstance(here, ast.ClassDef):
        assert {base.id for base in here.bases if isinstance(base, ast.Name)} & {
            "Enum",
            "Exception",
            "RayError",
        }
        return
    assert isinstance(there, ast.FunctionDef)
    positional = [argument.arg for argument in there.args.posonlyargs + there.args.args]
    ours = [argument.arg for argument in here.args.posonlyargs + here.args.args]
    assert ours == positional[: len(ours)]
    required = len(positional) - len(there.args.defaults)
    assert len(ours) >= required, f"the real {name} needs {positional[:required]}"
    assert len(ours) - len(here.args.defaults) == min(required, len(ours))
    assert {argument.arg for argument in here.args.kwonlyargs} <= {
        argument.arg for argument in there.args.kwonlyargs
    } | set(positional)


def test_every_public_name_of_the_stand_ins_is_compared() -> None:
    of_the_stand_ins_alone = {"ObjectRef", "place"}
    for path in STUBS.rglob("*.py"):
        stub = path.relative_to(STUBS).as_posix()
        names = {
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        compared = {name.split(".")[0] for name in DEFINED_IN.get(stub, {})}
        assert {
            name for name in names if not name.startswith("_")
        } <= compared | of_the_stand_ins_alone, stub

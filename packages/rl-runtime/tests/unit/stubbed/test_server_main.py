"""What a server process does around SGLang, with a stand-in for it (`nox -s stubs`)."""

import os
from pathlib import Path

import pytest

sglang = pytest.importorskip("sglang")
if Path(sglang.__file__).parents[1].name != "stubs":
    pytest.skip(
        "needs the stand-ins of tests/stubs on the path: nox -s stubs", allow_module_level=True
    )

from sglang.srt.entrypoints import http_server  # noqa: E402
from sglang.srt.utils import ENDED  # noqa: E402

from rl_runtime.engine import server  # noqa: E402


def test_a_server_on_an_accelerator_gets_its_arguments_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "die_with_parent", lambda *_: None)
    monkeypatch.setattr("rl_topp.sglang.plugin.require_installed", lambda: None)
    arguments = ["--model-path", "folder", "--device", "cuda"]
    server.main(arguments)
    (launched,) = http_server.LAUNCHED
    assert launched == arguments
    assert (os.getpid(), False) in ENDED

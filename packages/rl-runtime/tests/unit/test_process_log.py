"""Standard error goes to a file for a while, native code's too, and then to the terminal again."""

import os
from pathlib import Path

import pytest

from rl_runtime.process.logs import errors_to_file


def test_standard_error_is_in_the_file_for_the_time_of_the_block(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "driver.log"
    path.write_text("before\n")
    with pytest.raises(KeyboardInterrupt), errors_to_file(path):
        os.write(2, b"trace\n")
        raise KeyboardInterrupt
    os.write(2, b"message\n")
    assert path.read_text() == "before\ntrace\n"
    assert capfd.readouterr().err == "message\n"

"""Everything that proves the workspace. `uv run nox` runs the default sessions; `uv run nox -l` lists all of them.

Sessions that need torch share the environment of `uv sync`.
"""

from __future__ import annotations

import nox

nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "unit", "e2e"]

PACKAGES = ["rl-schedule", "rl-metrics", "rl-dump", "rl-topp", "rl-runtime"]
THREADS = {"OMP_NUM_THREADS": "1"}


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, and the star: the four leaves never import one another."""
    session.run("ruff", "check", ".")
    session.run("lint-imports")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Strict types of all sources."""
    for package in PACKAGES:
        session.run("mypy", f"packages/{package}/src")


@nox.session(venv_backend="none")
def unit(session: nox.Session) -> None:
    """Unit, property, golden and distributed tests of all packages, with real gloo."""
    for package in PACKAGES:
        session.run("pytest", f"packages/{package}/tests", *session.posargs, env=THREADS)


@nox.session(venv_backend="none")
def e2e(session: nox.Session) -> None:
    """The quick start, shortened, with its engines: Ray, SGLang and Megatron-Core."""
    session.run("pytest", "packages/rl-runtime/tests/e2e", "-m", "e2e", *session.posargs, env=THREADS)


@nox.session(venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Large counts of random cases."""
    for package in PACKAGES:
        session.run("pytest", f"packages/{package}/tests", "-m", "fuzz", *session.posargs, env=THREADS)

#!/usr/bin/env -S uv run --script
# /// script
# requires-python = ">=3.12"
# dependencies = ["nox[uv]>=2025.5"]
# ///
"""Everything that proves the workspace.

`uv run nox` runs the default sessions; `uv run nox -l` lists all of them.

Packages and their Pythons are read from the tree: a folder of `packages/` with a `pyproject.toml`,
and its version classifiers. A package that depends on none of its siblings is a leaf. Sessions of
one package build its wheel and test it in a fresh environment, from a folder outside the checkout;
all others share the environment of `uv sync`, which holds torch and the engines.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False

ROOT = Path(__file__).parent
PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: nox.project.load_toml(path)
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
PYTHONS = {name: nox.project.python_versions(project) for name, project in PROJECTS.items()}
REQUIREMENTS = {
    name: [Requirement(line) for line in project["project"]["dependencies"]]
    for name, project in PROJECTS.items()
}
LEAVES = [
    name
    for name in PROJECTS
    if not {requirement.name for requirement in REQUIREMENTS[name]} & set(PROJECTS)
]
ASSEMBLIES = [name for name in PROJECTS if name not in LEAVES]
# Too heavy for a fresh environment: tests that need one are skipped there, and run in `torch_cpu`
# and `e2e`.
ENGINES = {
    "torch",
    "megatron-core",
    "sglang",
    "flash-attn-4",
    "ray",
    "transformers",
    "reasoning-gym",
}
UNTRIED_EXTRAS = {"sglang": "it is pinned to one release, which torch_cpu runs"}
NEEDS_MORE_THAN_A_CPU = {"gpu", "cuda", "trl", "server"}
TEST_TOOLS = ["pytest>=8.4", "hypothesis>=6.130", "jsonschema>=4.25"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PYTEST = nox.project.load_toml(ROOT / "pyproject.toml")["tool"]["pytest"]["ini_options"]
STRICT = [
    *("-W", "error", "-ra", "--import-mode=importlib", "--strict-markers"),
    *("-p", "no:cacheprovider", "--hypothesis-profile=small"),
    *("-o", "markers=" + "\n".join(PYTEST["markers"])),
    *PYTEST["addopts"][-2:],  # the tiers that are off by default
]
NOTHING_COLLECTED = 5
"""The exit status of pytest when no test matches its options."""


def workspace(session: nox.Session, *command: str, **environment: str) -> None:
    """Run a command in the workspace's environment.

    Its processes have one thread each, because tests start several.
    """
    synchronise()
    prefix = ("uv", "run", "--no-sync", "--project", str(ROOT))
    session.run(*prefix, *command, external=True, env={**ONE_THREAD, **environment})


@cache
def synchronise() -> None:
    """Bring the workspace's environment up to date, once.

    Compiling its 35,000 modules anew takes longer than most sessions.
    """
    subprocess.run(["uv", "sync", "--frozen", "--project", str(ROOT)], check=True)


@contextmanager
def to_the_end(session: nox.Session) -> Iterator[Callable[..., None]]:
    """Give a `workspace` that goes on after a failure; the session fails when all has run."""
    failed = []

    def run(*command: str, **environment: str) -> None:
        try:
            workspace(session, *command, **environment)
        except CommandFailed:
            failed.append(" ".join(command[:3]))

    yield run
    if failed:
        session.error("failed: " + "; ".join(failed))


def every_package(
    session: nox.Session, *options: str, leaf_options: tuple[str, ...] = (), selects: bool = False
) -> None:
    """Run the tests of all packages; one that fails does not keep the others from running.

    Args:
        session: The session; it fails at the end and names every package that failed.
        options: For pytest. What follows `--` on the command line comes after them.
        leaf_options: For the leaves alone, where `NAME` is the import name.
        selects: Whether the options select tests that not every package has. A package without a
            match is fine then, or when tests are selected on the command line; no match in any
            package is a failure always.
    """
    selects = selects or bool(session.posargs)
    failed, matched, skips = [], False, []
    for package in PROJECTS:
        own = leaf_options if package in LEAVES else ()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = ["pytest", f"packages/{package}/tests", f"--junitxml={report}", *options]
            command += [option.replace("NAME", package.replace("-", "_")) for option in own]
            try:
                workspace(session, *command, *session.posargs)
                matched = True
            except CommandFailed as error:
                nothing = error.return_code == NOTHING_COLLECTED
                matched = matched or not nothing
                if not (nothing and selects):
                    failed.append(package)
            if report.exists():
                skips += [
                    str(skip.get("message"))
                    for skip in ET.parse(report).iter("skipped")  # noqa: S314 - pytest wrote it
                ]
    if "CI" in os.environ and any("chromium" in reason for reason in skips):
        session.error("a test was skipped because chromium or chromedriver is missing")
    if failed:
        session.error(f"failed: {', '.join(failed)}")
    if not matched:
        session.error("no package has a test that matches")


def install(session: nox.Session, *arguments: str) -> None:
    """Install into a session's own environment.

    Modules are compiled as they are imported, since most of them never are.
    """
    session.install(*arguments, env={"UV_COMPILE_BYTECODE": "0"})


def build_wheels(session: nox.Session, *packages: str) -> list[str]:
    """Build wheels into the session's temporary folder."""
    folder = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    build = ("uv", "build", "--quiet", "--wheel", "--out-dir", str(folder))
    for package in packages:
        session.run_install(*build, str(ROOT / "packages" / package), external=True)
    return [str(path) for path in sorted(folder.glob("*.whl"))]


def run_installed(
    session: nox.Session, package: str, *options: str, path: str | None = None
) -> None:
    """Run a package's tests, and its README, against what is installed.

    They run in a folder from which the checkout can neither be imported nor read.
    """
    with tempfile.TemporaryDirectory(prefix=f"{package}-") as folder:
        skipped = shutil.ignore_patterns(
            "distributed", "e2e", "contracts", "docs", "__pycache__", ".hypothesis"
        )
        source = ROOT / "packages" / package
        shutil.copytree(source / "tests", Path(folder) / "tests", ignore=skipped)
        shutil.copy(source / "README.md", folder)
        with session.chdir(folder):
            command = ["python", "-m", "pytest", "tests", *STRICT, *options, *session.posargs]
            session.run(*command, env={**ONE_THREAD, "PYTHONPATH": path})


def install_light(session: nox.Session, package: str) -> None:
    """Install an assembling package with its siblings and what it needs that is light."""
    siblings = [
        requirement.name for requirement in REQUIREMENTS[package] if requirement.name in PROJECTS
    ]
    needed = {requirement for name in (package, *siblings) for requirement in REQUIREMENTS[name]}
    heavy = ENGINES | set(PROJECTS)
    light = sorted(str(requirement) for requirement in needed if requirement.name not in heavy)
    install(session, *light, *TEST_TOOLS)
    install(session, "--no-deps", *build_wheels(session, package, *siblings))


def install_floor(session: nox.Session, package: str, *extras: str) -> None:
    """Install a leaf with the lowest versions of its direct dependencies and of some extras."""
    # Named here, they are direct ones; the wheel's own would be taken at their highest.
    install(
        session,
        "--resolution=lowest-direct",
        *map(str, REQUIREMENTS[package]),
        *(line for extra in extras for line in OPTIONAL[package][extra]),
        *build_wheels(session, package),
    )
    install(session, *TEST_TOOLS)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, layers and the star of imports, the skeleton of packages, changelogs, the lock."""
    with to_the_end(session) as run:
        run("ruff", "check", ".")
        run("ruff", "format", "--check", ".")
        run("lint-imports")
        run("python", ".ci/skeleton.py")
        run("python", ".ci/changelogs.py")
        run("pytest", ".ci", "-q", "-o", "pythonpath=.ci")
        run("uv", "lock", "--check", "--quiet")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Strict types of all sources, tests, benchmarks and tools."""
    tools = ["noxfile.py", *map(str, sorted(ROOT.glob(".ci/*.py")))]
    cases = "packages/rl-topp/benchmarks"  # rl-runtime's benchmarks use its cases
    with to_the_end(session) as run:
        run("mypy", *(f"packages/{package}/src" for package in PROJECTS), *tools)
        for package in PROJECTS:
            for folder in (f"packages/{package}/tests", f"packages/{package}/benchmarks"):
                run("mypy", "--explicit-package-bases", folder, MYPYPATH=f"{folder}:{cases}")


@nox.session
@nox.parametrize(
    ["package", "python"],
    [(package, python) for package in PROJECTS for python in PYTHONS[package]],
    ids=[f"{package}-{python}" for package in PROJECTS for python in PYTHONS[package]],
)
def alone(session: nox.Session, package: str) -> None:
    """The wheel alone in a fresh environment, tested from a folder outside the checkout."""
    if package in LEAVES:
        install(session, *build_wheels(session, package), *TEST_TOOLS)
    else:
        install_light(session, package)
    run_installed(session, package)


@nox.session
@nox.parametrize(
    ["package", "python"], [(name, PYTHONS[name][0]) for name in ASSEMBLIES], ids=ASSEMBLIES
)
def stubs(session: nox.Session, package: str) -> None:
    """The same for what assembles the others, with small stand-ins for its engines on the path."""
    install_light(session, package)
    run_installed(session, package, path=str(ROOT / "packages" / package / "tests" / "stubs"))


@nox.session
@nox.parametrize(["package", "python"], [(name, PYTHONS[name][0]) for name in LEAVES], ids=LEAVES)
def floor(session: nox.Session, package: str) -> None:
    """Each leaf with the lowest versions of its direct dependencies, on its lowest Python."""
    install_floor(session, package)
    # The oldest typer imports what today's click calls deprecated.
    run_installed(session, package, "-W", "ignore:'click.:DeprecationWarning")


OPTIONAL = {name: PROJECTS[name]["project"].get("optional-dependencies", {}) for name in LEAVES}
EXTRAS = {name: sorted(set(extras) - set(UNTRIED_EXTRAS)) for name, extras in OPTIONAL.items()}
FLOORS = [(name, PYTHONS[name][end]) for name in LEAVES if EXTRAS[name] for end in (0, -1)]


@nox.session(default=False)
@nox.parametrize(["package", "python"], FLOORS, ids=["-".join(floor) for floor in FLOORS])
def extras(session: nox.Session, package: str) -> None:
    """Each leaf's extras at their lowest versions, on its lowest and its highest Python."""
    for extra in set(OPTIONAL[package]) & set(UNTRIED_EXTRAS):
        session.log(f"left out: {package}[{extra}], {UNTRIED_EXTRAS[extra]}")
    install_floor(session, package, *EXTRAS[package])
    run_installed(session, package, "-W", "ignore:'click.:DeprecationWarning")


@nox.session(python="3.12")
def release(session: nox.Session) -> None:
    """All wheels together in a fresh environment outside the checkout; `rl-runtime doctor` there.

    Versions are those of the lock, so that nothing new is downloaded for them.
    """
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder, "locked.txt")
        options = ["--frozen", "--no-emit-workspace", "--no-hashes", "--quiet"]
        session.run_install("uv", "export", *options, "-o", str(locked), external=True)
        install(session, f"--constraint={locked}", *build_wheels(session, *PROJECTS))
        with session.chdir(folder):
            session.run("rl-runtime", "doctor")


@nox.session(venv_backend="none")
def torch_cpu(session: nox.Session) -> None:
    """Tests of all packages with torch, real gloo processes and a real SGLang server.

    They cover 90 % of each leaf's branches.
    """
    covered = () if session.posargs else ("--cov=NAME", "--cov-fail-under=90")
    skipped = ("--ignore-glob=*/tests/contracts", "--ignore-glob=*/tests/docs")
    every_package(session, *skipped, leaf_options=covered)


@nox.session(venv_backend="none")
def contracts(session: nox.Session) -> None:
    """Documents between packages: frozen examples, copies byte for byte, writers and readers."""
    workspace(session, "pytest", "packages/rl-runtime/tests/contracts", *session.posargs)
    workspace(session, "rl-runtime", "doctor")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation: generated pages are current, code blocks run, it builds unwarned."""
    workspace(session, "pytest", "packages/rl-runtime/tests/docs", *session.posargs)
    workspace(session, "mkdocs", "build", "--strict", "--quiet")


@nox.session(venv_backend="none")
def e2e(session: nox.Session) -> None:
    """The quick start, shortened, with its engines: Ray, SGLang and Megatron-Core."""
    workspace(session, "pytest", "packages/rl-runtime/tests/e2e", "-m", "e2e", *session.posargs)


@nox.session(venv_backend="none")
def bench_tiny(session: nox.Session) -> None:
    """Every benchmark that a CPU can run, at its smallest size: it runs, its figures mean nothing.

    What is left out is named; a benchmark without `--tiny` must say in its name what it needs.
    """
    with to_the_end(session) as run:
        for path in benchmark_programs():
            shown = path.relative_to(ROOT)
            if "--tiny" in path.read_text(encoding="utf-8"):
                run("python", str(shown), "--tiny")
            elif needs := what_it_needs(path):
                session.log(f"left out: {shown}, needs {' and '.join(needs)}")
            else:
                session.error(f"{shown}: has no option --tiny")


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """The benchmarks given after `--`, or all that need no accelerator."""
    paths = session.posargs or [str(p) for p in benchmark_programs() if not what_it_needs(p)]
    for path in paths:
        workspace(session, "python", path)


def benchmark_programs() -> list[Path]:
    """List the benchmarks that are programs, not modules of one."""
    paths = sorted(ROOT.glob("packages/*/benchmarks/*.py"))
    return [path for path in paths if "__main__" in path.read_text(encoding="utf-8")]


def what_it_needs(benchmark: Path) -> list[str]:
    """Name what a benchmark needs beside the workspace, which its file name says."""
    return sorted(NEEDS_MORE_THAN_A_CPU & set(benchmark.stem.split("_")))


@nox.session(venv_backend="none", default=False)
def properties(session: nox.Session) -> None:
    """Large counts of random cases."""
    every_package(session, "-m", "fuzz", selects=True)


@nox.session(venv_backend="none", default=False)
def soak(session: nox.Session) -> None:
    """Slow proofs: soaks, all pairs of layouts, tables over several starts."""
    every_package(session, "-m", "soak", selects=True)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Tests that need an accelerator."""
    every_package(session, "-m", "gpu", selects=True)


if __name__ == "__main__":
    nox.main()

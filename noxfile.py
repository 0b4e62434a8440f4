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

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import nox
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
ENGINES = {
    "torch",
    "megatron-core",
    "sglang",
    "flash-attn-4",
    "ray",
    "transformers",
    "reasoning-gym",
}
"""Dependencies too heavy for a fresh environment; tests that need one are skipped there, and run in `torch_cpu` and `e2e`."""
TEST_TOOLS = ["pytest>=8.4", "hypothesis>=6.130"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STRICT = [
    "-W",
    "error",
    "-ra",
    "--import-mode=importlib",
    "--strict-markers",
    "-p",
    "no:cacheprovider",
    "--hypothesis-profile=small",
]


def workspace(
    session: nox.Session, *command: str, success_codes: list[int] | None = None, **environment: str
) -> None:
    """Run a command in the workspace's environment, with one thread per process: tests start several."""
    synchronise()
    prefix = ("uv", "run", "--no-sync", "--project", str(ROOT))
    session.run(
        *prefix,
        *command,
        external=True,
        env={**ONE_THREAD, **environment},
        success_codes=success_codes,
    )


@cache
def synchronise() -> None:
    """Bring the workspace's environment up to date, once: compiling its 35,000 modules anew takes longer than most sessions."""
    subprocess.run(["uv", "sync", "--frozen", "--project", str(ROOT)], check=True)


def install(session: nox.Session, *arguments: str) -> None:
    """Install into a session's own environment; modules are compiled as they are imported, since most of them never are."""
    session.install(*arguments, env={"UV_COMPILE_BYTECODE": "0"})


def build_wheels(session: nox.Session, *packages: str) -> list[str]:
    """Build wheels into the session's temporary folder."""
    folder = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    for package in packages:
        session.run_install(
            "uv",
            "build",
            "--quiet",
            "--wheel",
            "--out-dir",
            str(folder),
            str(ROOT / "packages" / package),
            external=True,
        )
    return [str(path) for path in sorted(folder.glob("*.whl"))]


def run_installed(
    session: nox.Session, package: str, *options: str, path: str | None = None
) -> None:
    """Run a package's tests (and its README, which they execute) against what is installed, where the checkout cannot be imported or read."""
    with tempfile.TemporaryDirectory(prefix=f"{package}-") as folder:
        skipped = shutil.ignore_patterns(
            "distributed", "e2e", "contracts", "docs", "__pycache__", ".hypothesis"
        )
        shutil.copytree(
            ROOT / "packages" / package / "tests", Path(folder) / "tests", ignore=skipped
        )
        shutil.copy(ROOT / "packages" / package / "README.md", folder)
        with session.chdir(folder):
            session.run(
                "python",
                "-m",
                "pytest",
                "tests",
                *STRICT,
                *options,
                *session.posargs,
                env={**ONE_THREAD, "PYTHONPATH": path},
            )


def install_light(session: nox.Session, package: str) -> None:
    """Install an assembling package with its siblings and whatever it needs that is light, and nothing else."""
    siblings = [
        requirement.name for requirement in REQUIREMENTS[package] if requirement.name in PROJECTS
    ]
    needed = {requirement for name in (package, *siblings) for requirement in REQUIREMENTS[name]}
    light = sorted(
        str(requirement)
        for requirement in needed
        if requirement.name not in ENGINES | set(PROJECTS)
    )
    install(session, *light, *TEST_TOOLS)
    install(session, "--no-deps", *build_wheels(session, package, *siblings))


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style; the star of imports: leaves never import one another; the skeleton of every package."""
    workspace(session, "ruff", "check", ".")
    workspace(session, "ruff", "format", "--check", ".")
    workspace(session, "lint-imports")
    workspace(session, "python", ".ci/skeleton.py")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Strict types of all sources, all tests and this file."""
    workspace(
        session,
        "mypy",
        *(f"packages/{package}/src" for package in PROJECTS),
        "noxfile.py",
        *map(str, sorted(ROOT.glob(".ci/*.py"))),
    )
    for package in PROJECTS:
        tests = f"packages/{package}/tests"
        workspace(session, "mypy", "--explicit-package-bases", tests, MYPYPATH=tests)


@nox.session
@nox.parametrize(
    ["package", "python"],
    [(package, python) for package in PROJECTS for python in PYTHONS[package]],
    ids=[f"{package}-{python}" for package in PROJECTS for python in PYTHONS[package]],
)
def alone(session: nox.Session, package: str) -> None:
    """The wheel alone in a fresh environment: unit, golden and small property tests, from a folder outside the checkout."""
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
    """The same for what assembles the others, with small stand-ins for Megatron-Core, SGLang and Ray on the path."""
    install_light(session, package)
    run_installed(session, package, path=str(ROOT / "packages" / package / "tests" / "stubs"))


@nox.session
@nox.parametrize(["package", "python"], [(name, PYTHONS[name][0]) for name in LEAVES], ids=LEAVES)
def floor(session: nox.Session, package: str) -> None:
    """Each leaf with the lowest versions of its direct dependencies, on its lowest Python."""
    # Named here, they are direct ones; the wheel's own would be taken at their highest.
    install(
        session,
        "--resolution=lowest-direct",
        *map(str, REQUIREMENTS[package]),
        *build_wheels(session, package),
    )
    install(session, *TEST_TOOLS)
    # The oldest typer imports what today's click calls deprecated.
    run_installed(session, package, "-W", "ignore:'click.:DeprecationWarning")


@nox.session(venv_backend="none")
def torch_cpu(session: nox.Session) -> None:
    """Tests of all packages with torch, real gloo processes and a real SGLang server; they cover 90 % of each leaf's branches."""
    skipped = ["--ignore-glob=*/tests/contracts", "--ignore-glob=*/tests/docs"]
    for package in PROJECTS:
        covered = (
            ["--cov=" + package.replace("-", "_"), "--cov-fail-under=90"]
            if package in LEAVES and not session.posargs
            else []
        )
        workspace(
            session, "pytest", f"packages/{package}/tests", *skipped, *covered, *session.posargs
        )


@nox.session(venv_backend="none")
def contracts(session: nox.Session) -> None:
    """Documents between packages: frozen examples, the readers' copies byte for byte, every reader on all of them, the installed metadata."""
    workspace(session, "pytest", "packages/rl-runtime/tests/contracts", *session.posargs)
    workspace(session, "rl-runtime", "doctor")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation: its generated pages are current, its code blocks run, and it builds without a warning."""
    workspace(session, "pytest", "packages/rl-runtime/tests/docs", *session.posargs)
    workspace(session, "mkdocs", "build", "--strict", "--quiet")


@nox.session(venv_backend="none")
def e2e(session: nox.Session) -> None:
    """The quick start, shortened, with its engines: Ray, SGLang and Megatron-Core."""
    workspace(session, "pytest", "packages/rl-runtime/tests/e2e", "-m", "e2e", *session.posargs)


@nox.session(venv_backend="none", default=False)
def properties(session: nox.Session) -> None:
    """Large counts of random cases."""
    for package in PROJECTS:
        workspace(
            session,
            "pytest",
            f"packages/{package}/tests",
            "-m",
            "fuzz",
            *session.posargs,
            success_codes=[0, 5],
        )


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """The benchmarks given after `--`, such as packages/rl-metrics/benchmarks/reducers.py, or all that need no accelerator."""
    for path in session.posargs or sorted(
        str(path)
        for path in ROOT.glob("packages/*/benchmarks/*.py")
        if "__main__" in path.read_text()
    ):
        if session.posargs or not {"gpu", "cuda"} & set(Path(path).stem.split("_")):
            workspace(session, "python", path)


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Tests that need an accelerator."""
    for package in PROJECTS:
        workspace(
            session,
            "pytest",
            f"packages/{package}/tests",
            "-m",
            "gpu",
            *session.posargs,
            success_codes=[0, 5],
        )


if __name__ == "__main__":
    nox.main()

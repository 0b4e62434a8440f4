"""The table of `docs/contracts.md`: where products write a contract, and where others read it."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

__all__ = ["PACKAGES", "READERS", "WRITERS", "Site", "golden_files"]

PACKAGES = Path(__file__).parents[3]


@dataclass(frozen=True)
class Site:
    """A place in a product that writes or reads a contract."""

    contract: str
    """Its id."""
    name: str
    """"module:function"."""

    @property
    def package(self) -> str:
        """Name of the distribution."""
        return self.name.partition(".")[0].replace("_", "-")

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.name.partition(":")[0]

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        found: Callable[..., Any] = attrgetter(self.name.partition(":")[2])(
            import_module(self.module)
        )
        return found


def _sites() -> tuple[list[Site], list[Site]]:
    writers: list[Site] = []
    readers: list[Site] = []
    page = (PACKAGES.parent / "docs" / "contracts.md").read_text(encoding="utf-8")
    for contract, written, read in re.findall(
        r"^\| `([a-z-]+\.v\d+)` \| [^|]* \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE
    ):
        for sites, cell in ((writers, written), (readers, read)):
            sites += [Site(contract, name) for name in re.findall(r"`([\w.]+:[\w.]+)`", cell)]
    return writers, readers


WRITERS, READERS = _sites()


def golden_files(package: str, contract: str) -> dict[str, Path]:
    """Return a package's frozen documents, without the note on where they come from."""
    folder = PACKAGES / package / "tests" / "golden" / contract
    return {path.name: path for path in sorted(folder.glob("*")) if path.name != "PROVENANCE.md"}

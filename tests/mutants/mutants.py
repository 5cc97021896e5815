"""Read bugs, each a change in one place of the source.

``test_mutants.py`` applies those of ``mutants.diff`` one at a time to a copy of the package, in
which the test that the mutant names must then fail; ``test_hopper_emulated.py`` those of
``hopper.diff``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Args:
        name: the mutant's name, also of its test.
        path: the file below ``flashattn/``.
        found: text that this file has exactly once.
        put: the text that replaces it.
        symptom: what a user would see.
        caught: what sees it, as the diff says after ``@@``.
    """

    name: str
    path: str
    found: str
    put: str
    symptom: str
    caught: str

    def __str__(self) -> str:
        """Return the name, for the test's id."""
        return self.name

    def applied(self, source: str) -> str:
        """Return the mutated source.

        Raises:
            ValueError: the text is not there exactly once.
        """
        times = source.count(self.found)
        if times != 1:
            raise ValueError(
                f"{self.name} no longer applies: wanted its text once in {self.path}, got {times}"
                f" times:\n{self.found}"
            )
        return source.replace(self.found, self.put)


def planted(diff, folder=""):
    """Yield the bugs of a diff beside this file, for files below ``flashattn/`` and ``folder``."""
    text = Path(__file__).with_name(diff).read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    for group in re.split(r"^@@ ", text, flags=re.MULTILINE)[1:]:
        caught, *bugs = re.split(r"\n(?=\w)", group.rstrip())
        for bug in bugs:
            told, *lines = bug.splitlines()
            place, symptom = told.split(": ", 1)
            path, name = place.split()
            found, put = ("\n".join(x[1:] for x in lines if x[0] in kept) for kept in (" -", " +"))
            yield Mutant(name, f"{folder}{path}", found, put, symptom, caught)

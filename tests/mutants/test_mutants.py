"""The suite can fail: each of these bugs, put into a copy of the package, is caught by a test."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The last comes from the interpreter: a mutant that reads memory that is not its own may find a
# signaling NaN.
SAID = (
    "assert ",
    "AssertionError",
    "Failed: DID NOT RAISE",
    "flashattn.testing.accuracy.InaccurateError",
    "triton.runtime.errors.InterpreterError: RuntimeWarning('invalid value",
)
IN_PYTORCH = (
    "api.py",
    "bounds.py",
    "mask.py",
    "masks.py",
    "resolve.py",
    "tiled.py",
)  # tests of any implementation would do
PLANTED = runpy.run_path(str(Path(__file__).with_name("mutants.py")))["planted"]
MUTANTS = list(PLANTED("mutants.diff"))


def test_mutants_apply():
    """Every mutant's text is in the source exactly once, changes it, and has a unique name."""
    for mutant in MUTANTS:
        source = (ROOT / "flashattn" / mutant.path).read_text()
        assert mutant.applied(source) != source
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


def chosen(mutant):
    """Return which implementation's tests are run."""
    in_pytorch = mutant.path in IN_PYTORCH or mutant.path.startswith(("parallel/", "integrations/"))
    return "tiled" if in_pytorch else "triton"


def parameter(mutant):
    """Return a parameter of ``test_mutant``, marked with the files that it concerns."""
    paths = f"flashattn/{mutant.path}", mutant.caught.partition("::")[0]
    mark = pytest.mark.concerns(*paths, of=repr(mutant))
    return pytest.param(mutant, id=mutant.name, marks=mark)


@pytest.mark.mutants
@pytest.mark.parametrize("name", ["triton", "tiled"])
def test_unmutated(name, verdict, request):
    """The tests pass on a copy that is not mutated: what they catch is the mutation."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    mutants = [call.params["mutant"] for call in given if call and "mutant" in call.params]
    asked = [mutant for mutant in mutants or MUTANTS if chosen(mutant) == name]
    if not asked:
        pytest.skip("no mutant of these was asked for")
    found = verdict(dict.fromkeys(mutant.caught.partition("[")[0] for mutant in asked), name)
    assert found.code == pytest.ExitCode.OK, found.output


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", list(map(parameter, MUTANTS)))
def test_mutant(mutant, verdict):
    """The test that a mutant names fails and says what is wrong, or the process dies in it."""
    found = verdict([mutant.caught], chosen(mutant), mutant)
    assert found.code != pytest.ExitCode.OK, f"nobody sees that {mutant.symptom}"
    assert found.test, f"no test failed:\n{found.output}"
    died = found.code is not None and found.code < 0
    assert died or found.code == pytest.ExitCode.TESTS_FAILED, found.output
    assert died or found.said.startswith(SAID), f"it fell over:\n{found.output}"

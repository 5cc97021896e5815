"""The gate on time: the working tree against another revision, in turns.

Collected instead of all other benchmarks, and only, with ``--gate-against`` or ``--gate-selftest``.
Cases are in ``flashattn/gate/cases.py``, each with its reason.

Exit status: 0 when all are SAME (surely not slower), FASTER, or NEW in the working tree; 1 when a
case is SLOWER or does not run, which is a failed test; 10 when one is AMBIGUOUS, so that it may be
slower, and 11 when one is UNPROVEN, because this machine is too noisy or the old revision does not
start, which are skipped tests: they fail nobody, and prove nothing either; 12 when a slow-down made
on purpose was not seen, so that nothing here is to be believed. Beside the gate, 13: a limit of
--benchmark-compare-fail lies inside the noise of the runs that it compares.
"""

from __future__ import annotations

import pytest

from flashattn.gate.plugin import FAILED, UNSETTLED


def pytest_generate_tests(metafunc):
    """Make an item for each case, and for each slow-down made on purpose."""
    gate = metafunc.config.pluginmanager.get_plugin("gate")
    timed = gate.timed() if gate else []
    ids = [f"{case}{share:+.0%}" if share else str(case) for case, share in timed]
    metafunc.parametrize("timed", timed, ids=ids)


@pytest.fixture
def gate(pytestconfig):
    """Return what holds the two revisions against each other."""
    return pytestconfig.pluginmanager.get_plugin("gate")


def bench_gate(gate, timed):
    """Time a case in both revisions until the difference is certain; fail when it is slower."""
    outcome = gate.judge(*timed)
    if outcome.verdict in FAILED:
        pytest.fail(str(outcome), pytrace=False)
    if outcome.verdict in UNSETTLED:
        pytest.skip(str(outcome))

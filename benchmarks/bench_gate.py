"""The performance gate: compare the working tree with another revision.

``--gate-against`` or ``--gate-selftest`` collects this file instead of all other benchmarks. The
cases are in ``flashattn/gate/cases.py``.

Exit status:
    0: every case is SAME (surely not slower), FASTER, or NEW.
    1: a case is SLOWER or does not run; its test fails.
    10: a case is AMBIGUOUS: it may be slower; its test is skipped.
    11: a case is UNPROVEN: the machine is too noisy, or the old revision does not start; its test
        is skipped.
    12: an injected slowdown was not detected, so no result can be trusted.
    13 (without the gate): a limit of --benchmark-compare-fail is within the noise of the runs.
"""

import pytest

from flashattn.gate.plugin import FAILED, UNSETTLED


def pytest_generate_tests(metafunc):
    """Make a test for each case and for each injected slowdown."""
    gate = metafunc.config.pluginmanager.get_plugin("gate")
    timed = gate.timed() if gate else []
    ids = [f"{case}{share:+.0%}" if share else str(case) for case, share in timed]
    metafunc.parametrize("timed", timed, ids=ids)


def bench_gate(pytestconfig, timed):
    """Time a case in both revisions until the verdict is settled; fail if it is SLOWER."""
    outcome = pytestconfig.pluginmanager.get_plugin("gate").judge(*timed)
    if outcome.verdict in FAILED:
        pytest.fail(str(outcome), pytrace=False)
    if outcome.verdict in UNSETTLED:
        pytest.skip(str(outcome))

"""Run pytest in a forked process, which need not import PyTorch and Triton again.

``conftest.examine`` gives ``FOLDER``, ``ARGUMENTS`` and ``ENVIRONMENT``. What is printed goes to
``output.txt`` in the folder, and the process ends with pytest's exit status.
"""

import gc
import os
import sys

import hypothesis
import pytest
import torch

os.chdir(FOLDER)  # noqa: F821
os.environ.update(ENVIRONMENT)  # noqa: F821
sys.path.insert(0, FOLDER)  # noqa: F821 - before what is installed
torch.set_num_threads(1)
sys.dont_write_bytecode = True  # links lead to the bytecode of the unmutated package
hypothesis.settings.register_profile(
    "at once",
    max_examples=20,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),  # but not Phase.shrink
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
with open("output.txt", "wb") as file:  # noqa: PTH123
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)
gc.freeze()  # what was imported before the fork need not be collected again
sys.exit(pytest.main(ARGUMENTS))  # noqa: F821

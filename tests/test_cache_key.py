"""A kernel's key in Triton's cache is the same in every process."""

import os
import subprocess
import sys

# The key of each kernel, as a launch asks for it: in reverse order in the child process.
KEYS = """
import os
from flashattn.kernels.cache_key import with_stable_key
from flashattn.kernels.hopper import backward, backward_d256, backward_fp32, forward, forward_fp32
from flashattn.kernels.portable import backward as bwd, forward as fwd, merge, preprocess

modules = forward, forward_fp32, backward, backward_d256, backward_fp32, fwd, bwd, preprocess, merge
child = os.fork()
for module in modules[:: 1 if child else -1]:
    for name, kernel in vars(module).items():
        if name.startswith("flashattn_"):
            os.write(1, f"{name} {with_stable_key(kernel).cache_key}\\n".encode())
if child:
    os.waitpid(child, 0)
"""


def test_keys_do_not_depend_on_the_order():
    """A process finds what others have compiled, whichever kernel it launches first."""
    found = subprocess.run(
        [sys.executable, "-c", KEYS],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert len(set(found)) > 10
    assert all(found.count(line) == 2 for line in found)

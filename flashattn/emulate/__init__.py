"""Emulate the Gluon kernels on a CPU, with a random schedule and late copies and products.

Gluon has no interpreter. Here a kernel's source runs as plain Python on torch tensors. Each role is
a greenlet, and one runs at a time. Wherever a role could wait, a seeded draw picks the role that
goes on or the copy that proceeds. So runs are reproducible, and deadlocks are detected.

Asynchronous operations are as late as drawn. A tile is NaN from the start of its copy until it
lands. A product reads its operands when it starts or when it is waited for. What threads store to
shared memory is visible to copies and products after a fence. A copy to memory reads, and writes
later.

Not emulated: layouts, bank conflicts, registers, fences between memories of the GPU, 32-bit
overflow, and inline assembly: ``barrier_wait``, ``wait_eq`` and ``arrive_inc`` are emulated as a
whole.
"""

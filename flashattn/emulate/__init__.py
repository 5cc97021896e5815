"""The Gluon kernels on a CPU: warps in turns that are drawn, copies and products that come late.

Gluon has no interpreter. Here a kernel's source runs as plain Python on torch's tensors. Each role
is a greenlet, and one runs at a time: wherever one could wait, a seeded draw picks who goes on, or
which copy moves. So a run can be repeated, and a deadlock is seen when nothing can move.

What may be late is as late as drawn: a tile is NaN from the moment that it is asked for until it
lands; a product reads its operands when it is begun or when it is waited for; what threads store to
shared memory reaches copies and products by a fence; a copy to memory reads, and later writes.

Not emulated: layouts, bank conflicts, registers, fences between memories of the GPU, 32-bit
overflow, and the texts of assembler: ``barrier_wait``, ``wait_eq`` and ``arrive_inc`` are done
as a whole.
"""

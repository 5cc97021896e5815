"""Gluon kernels for Hopper (sm_90a): warp-specialized, with tiles that TMA loads."""

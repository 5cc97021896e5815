"""Kernels for Hopper (sm_90a) in Gluon: warps with roles, tiles that come by themselves."""

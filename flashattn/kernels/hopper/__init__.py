"""Kernels for sm_90a in Gluon: warps with roles, tiles that arrive by themselves, products in flight."""

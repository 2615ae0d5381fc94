"""Kernels: products that take care of their own speed, and the choice of one by platform."""

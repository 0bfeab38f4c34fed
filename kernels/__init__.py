"""The CUDA sources, installed as the resource package `f16lab.kernels`."""

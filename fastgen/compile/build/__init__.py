"""Builds kernels: compilers, the cache, the loader, tuning and sealed bundles."""

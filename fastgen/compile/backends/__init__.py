"""The backends that compute the ops of an engine: the torch reference, C++ kernels, Triton kernels."""

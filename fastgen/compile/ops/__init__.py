"""The ops that kernels compute: a folder each.

==================  ================================================================================================
``reference.py``    the executable torch reference: what is computed, with shapes, rounding and source
``cpp.py``          the C++ kernels: ``<op>_spec()`` builds the kernel spec, ``<Op>Kernel`` launches the built kernel
``triton.py``       the Triton kernels, by the same names; ``<op>_specs()`` where an op takes several launches
``templates/``      what the specs are rendered from, see :mod:`fastgen.compile.render`
``shape.py`` …      what both targets share, or how Triton's kernels are cut (``tiling.py``); named by what it holds
``tuning.py``       which way of cutting the kernel is the fastest on this device
==================  ================================================================================================

A name has no prefix of its target: callers that need both write ``cpp.activation_spec`` and ``triton.activation_spec``.
An op of several kernels names each (``route_spec`` and ``RouteKernel``, ``sort_spec`` and ``SortKernel``).

Shape letters: ``T`` tokens of the step, ``S`` sequences, ``H`` hidden, ``N`` query heads, ``K`` KV heads, ``D`` head
size (``Dv`` that of values, where it differs), ``F`` feed-forward, ``V`` vocabulary, ``E`` experts, ``k`` experts of a
token, ``B`` blocks, ``P`` tokens per block, ``R`` rows that need logits.
"""

"""One file an op. Shape letters: ``T`` tokens of the step, ``S`` sequences, ``H`` hidden, ``N`` query heads,
``K`` KV heads, ``D`` head size (``Dv`` that of values, where it differs), ``F`` feed-forward, ``V`` vocabulary,
``E`` experts, ``k`` experts of a token, ``B`` blocks, ``P`` tokens per block, ``R`` rows that need logits.
"""

# embedding(H=256, dtype=bf16, table_dtype=bf16, resolve=True, scale=16.0, block=256, tiles=1, num_warps=1) for triton

import triton
import triton.language as tl


@triton.jit
def embedding_h256_bf16_bf16_resolve_scale16_0_block256_tiles1(ids_ptr, token_source_ptr, sampled_ids_ptr, table_ptr, out_ptr):
    """Rows of H features of a table, by their ids."""
    H: tl.constexpr = 256
    BLOCK: tl.constexpr = 256
    TILES: tl.constexpr = 1  # programs that share a row
    row = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    which = tl.load(ids_ptr + row)
    source = tl.load(token_source_ptr + row)
    which = tl.where(source < 0, which, tl.load(sampled_ids_ptr + tl.maximum(source, 0)))
    x = tl.load(table_ptr + which.to(tl.int64) * H + column).to(tl.float32)
    x = (x * 16.0).to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + row * H + column, x.to(tl.bfloat16))

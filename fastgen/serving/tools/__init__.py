"""Tool calls: the formats that models use, a parser for them, and grammars that enforce them."""

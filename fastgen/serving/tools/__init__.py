"""How models call tools: what each format looks like, calls read from text, grammars that demand them."""

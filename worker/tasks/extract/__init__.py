"""extract: a schema and a text in, records out. RexUniNLU, by its published layout and its reference's algorithm.

`prompts` makes sequences, `model` computes them, `records` reads what comes back, and `extraction` goes with all
texts from level to level.
"""

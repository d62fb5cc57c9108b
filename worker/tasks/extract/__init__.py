"""The task extract: a schema and a text in, records out, as RexUniNLU's reference finds them.

`prompts` makes sequences, `model` computes them, `records` reads what comes back, and `extraction` goes with all
texts from level to level.
"""

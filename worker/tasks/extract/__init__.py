"""The task `extract`: find the records of a schema in a text, as RexUniNLU's reference does.

`prompts` makes sequences, `model` computes them, `records` reads the results, and `extraction` takes all
texts from level to level.
"""

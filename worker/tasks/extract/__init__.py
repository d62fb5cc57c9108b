"""extract: a schema and a text in, records out. RexUniNLU, by its published layout and its reference's algorithm.

`prompt_tokenizer`, `hints`, `windows` and `layout` make sequences, `model` computes them, `decode` and `classification`
read what comes back, `text_state` keeps how far a text is, and `extraction` goes with all texts from level to level.
"""

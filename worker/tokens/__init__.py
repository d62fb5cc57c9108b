"""Tokenization: texts to token ids with the Rust tokenizers library. No module here imports torch."""

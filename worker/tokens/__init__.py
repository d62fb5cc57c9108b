"""Texts to token ids, by the Rust tokenizers library. No torch."""

"""Texts to token ids, as the Rust tokenizers library gives them. No torch."""

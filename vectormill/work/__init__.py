"""Leased work of every feature: claim, renew, fence, retry with backoff, hand back, fail and cancel."""

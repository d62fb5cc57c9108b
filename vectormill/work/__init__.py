"""Leased work of every feature: claim, renew, fence, count attempts, retry with backoff, hand back, fail and
cancel.
"""

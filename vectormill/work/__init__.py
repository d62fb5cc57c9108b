"""Leased work: claim, renew, fence, attempt, back-off, hand back, give up and cancel, once for all that use it."""

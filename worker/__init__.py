"""The worker: Celery tasks on top of an Engine that owns one model on one device.

It imports vectormill, but never api.
"""

"""Encoding: Celery tasks on top of an Engine that owns one model on one device. Imports vectormill; never api."""

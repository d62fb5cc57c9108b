"""The network of the task `extract` and its head, which run on the device.

This is the task's only folder that imports torch.
"""

"""Classifiers: models that answer a number for each label, as transformers has them and as they were published."""

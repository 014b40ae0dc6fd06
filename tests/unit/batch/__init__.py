"""Batch jobs from end to end, with an engine without a model."""

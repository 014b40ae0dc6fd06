"""The control plane without a model: loads, contenders and their readers."""

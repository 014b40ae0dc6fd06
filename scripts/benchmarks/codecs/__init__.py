"""Codecs of the host tier: the error of K/V that come back, and of what a model says with them."""
